"""Measure compile time: a whole model under stock Inductor and under `mla`, each in a new process with an empty cache.

    python -m mla_compile.bench.compile_time --model deepseek_v2 --repeats 3

`deepseek_v2` has 27 layers like DeepSeek-V2-Lite, and runs a prefill and three decode steps with a DynamicCache. `gpt2`
has 12 layers without MLA, and runs one forward pass. Both have tiny widths, as compile time depends on the number of
nodes. The printed share is that of the work that stock Inductor does not do: the passes and the second trace.
Inductor's joint graph passes, which run after these instead of before, are printed separately.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from mla_compile.bench.progress import log
from mla_compile.cache.argument import cache_argument

BACKENDS = ("inductor", "mla")
PARTS = ("passes", "retrace", "joint_passes")
"""The parts of a compilation under `mla`, by their names in a report."""
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 27,
        "intermediate_size": 32,
        "vocab_size": 64,
        "max_position_embeddings": 512,
    },
    "gpt2": {"n_layer": 12, "n_embd": 64, "n_head": 4, "vocab_size": 64},
}
"""The fields of the transformers configuration for each model type."""


def compile_once(model_type: str, backend: str) -> dict[str, float]:
    """Seconds of the calls that compile (`total`), and of each of the `PARTS` of these, in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    import mla_compile

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    compiled: Any = torch.compile(model, backend=backend)
    ids = torch.arange(9)[None]
    start = time.perf_counter()
    with torch.inference_mode():
        if model_type == "gpt2":
            compiled(input_ids=ids, use_cache=False)
        else:
            cache, name = DynamicCache(config=config), cache_argument(model.forward)
            for tokens in (ids, ids[:, :1], ids[:, :1], ids[:, :1]):
                compiled(input_ids=tokens, **{name: cache})
    seconds = {"total": time.perf_counter() - start}
    for part in PARTS:
        seconds[part] = sum(report.seconds.get(part, 0.0) for report in mla_compile.reports())
    return seconds


def compile_afresh(model_type: str, backend: str) -> dict[str, float]:
    """Run `compile_once` in a new process with an empty cache directory. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __spec__.name, "--model", model_type, "--once", backend],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Run the backends in turn, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description="Compile a whole model under stock Inductor and under mla.")
    parser.add_argument("--model", choices=MODELS, default="deepseek_v2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", choices=BACKENDS, help="compile in this process and print the seconds as JSON")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(compile_once(arguments.model, arguments.once)))
        return
    runs: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for _ in range(arguments.repeats):
        for backend in BACKENDS:
            runs[backend].append(compile_afresh(arguments.model, backend))
            log(f"{backend:8} {runs[backend][-1]['total']:.1f} s")
    totals = {backend: statistics.median(run["total"] for run in runs[backend]) for backend in BACKENDS}
    passes, retrace, joint = (statistics.median(run[part] / run["total"] for run in runs["mla"]) for part in PARTS)
    both = statistics.median((run["passes"] + run["retrace"]) / run["total"] for run in runs["mla"])
    print(
        f"{arguments.model}: inductor {totals['inductor']:.1f} s, mla {totals['mla']:.1f} s "
        f"({totals['mla'] / totals['inductor']:.2f}x); of the time under mla, its passes take {passes:.1%} "
        f"and the second trace {retrace:.1%}, together {both:.1%}; Inductor's joint passes take {joint:.1%}"
    )


if __name__ == "__main__":
    main()
