"""One of the processes that share a model's heads: `python -m tests.hf.tensor_parallel FOLDER RANK`.

The folder holds models, and in `cases.json` how each is to be loaded (see test_tensor_parallel).
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.distributed import DistributedConfig

import mla_compile
from tests.hf.families import FAMILIES, interpreted

RANKS = 2


def load(folder, case):
    config = transformers.AutoConfig.from_pretrained(folder / case["family"])
    plan = mla_compile.tp_plan(config) if case["plan"] == "ours" else case["plan"]
    more = {"ep_size": RANKS} if case["experts"] else {}
    return getattr(transformers, config.architectures[0]).from_pretrained(
        folder / case["family"],
        dtype=torch.float32,
        attn_implementation=FAMILIES[case["family"]].attentions[0],
        distributed_config=DistributedConfig(tp_size=RANKS, tp_plan=plan, **more),
    )


def generate(model, ids):
    """The tokens, and the logits of each: [new tokens, B, vocabulary]."""
    made = model.generate(
        ids,
        max_new_tokens=4,
        do_sample=False,
        past_key_values=transformers.DynamicCache(config=model.config.get_text_config()),
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences, torch.stack(made.logits)


def bytes_of(model):
    """For each parameter, the bytes that this rank holds, or, of a file that is mapped into memory, reads."""
    return {name: getattr(p, "_local_tensor", p).nbytes for name, p in model.named_parameters()}


def run(folder, case):
    torch._dynamo.reset()
    model = load(folder, case)
    ids = torch.arange(2, 102)[None] % 60
    with interpreted(FAMILIES[case["family"]]):
        if case["prompts"]:
            return serve(model, case["prompts"][torch.distributed.get_rank()])
        if case["plan"] == "auto":
            return {"sites": described(mla_compile.explain(model, ids).sites)}
        found = {"bytes": bytes_of(model), "eager": generate(model, ids)}
        before = len(mla_compile.reports())
        # torch cannot compile a sharded embedding that shares a graph with what breaks it.
        for part in model.model.layers if case["family"] == "longcat_flash" else [model]:
            part.compile(backend="mla")
        found["compiled"] = generate(model, ids)
        return found | {"sites": [site for r in mla_compile.reports()[before:] for site in described(r.sites)]}


def serve(model, prompts):
    """What continuous batching writes on a rank that is asked for `prompts`."""
    outputs = mla_compile.ContinuousModel(model, pages=16, page_size=8).generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(max_batch_tokens=32),
        max_new_tokens=4,
    )
    return [output.generated_tokens for output in outputs.values()]


def described(sites):
    return [(site.path, site.shapes.get("N"), site.reason) for site in sites]


def main(folder, rank):
    torch.set_num_threads(1)
    store = f"file://{folder.absolute()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    cases = json.loads((folder / "cases.json").read_text())
    torch.save([run(folder, case) for case in cases], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
