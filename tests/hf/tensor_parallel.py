"""One of the processes that share a model's heads: `torchrun tensor_parallel.py FOLDER` (see test_tensor_parallel)."""

import sys
from pathlib import Path

import torch
import transformers

import mla_compile
from mla_compile import backend
from tests.interpreted import interpreted


def main(folder: Path) -> None:
    """Generate with the heads of this rank, eager and compiled, and leave what came of it in `folder/<rank>.pt`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    ids = torch.arange(100)[None] % model.config.vocab_size

    def generate():
        cache = transformers.DynamicCache(config=model.config)
        made = model.generate(
            ids,
            max_new_tokens=5,
            do_sample=False,
            past_key_values=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return made.sequences, torch.stack(made.logits)

    eager = generate()
    backend.compile_fx_inner = interpreted
    model.compile(backend="mla")
    found = {"eager": eager, "compiled": generate()}
    found["sites"] = [(site.path, site.shapes["N"]) for report in mla_compile.reports() for site in report.sites]
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
