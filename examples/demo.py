"""Have an unmodified trained DeepSeek-V3 write Python: eager, under stock Inductor, and under `backend="mla"`.

Run: make demo
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import mla_compile

CHECKPOINT = Path(__file__).parent / "tiny-deepseek-v3"
PROMPT = "import os\n\ndef read_file(path):\n"
TOKENS = 200
COMPILERS = (None, "inductor", "mla")
CACHES = ("dynamic", "static")


class Bar(BaseStreamer):
    """A progress bar that counts the tokens as they are generated."""

    def __init__(self, label: str) -> None:
        self.bar = tqdm(total=TOKENS, desc=label, unit="token", leave=False)
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        self.bar.update(1 if self.prompt_seen else 0)
        self.prompt_seen = True

    def end(self) -> None:
        self.bar.close()


@dataclass(frozen=True)
class Run:
    """One way to generate: its text, its times, and the paths of its sites."""

    compiler: str
    cache: str
    text: str
    first_seconds: float
    tokens_per_second: float
    sites: str


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: str, label: str) -> tuple[str, float]:
    """Greedily write `TOKENS` tokens after `PROMPT`. Returns the text and the seconds."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    start = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation="static" if cache == "static" else None,
        disable_compile=True,  # transformers would compile the model again
        streamer=Bar(label),
    )
    return tokenizer.decode(output[0]), time.perf_counter() - start


def measure(compiler: str | None, cache: str, tokenizer: PreTrainedTokenizerBase) -> Run:
    """Load the checkpoint, compile it in place, and generate once to compile and five times for timing."""
    torch.compiler.reset()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    before = len(mla_compile.reports())
    if compiler is not None:
        model.compile(backend=compiler)
    name = compiler or "eager"
    text, first = generate(
        model, tokenizer, cache, f"{name}, {cache} cache: {'compiling' if compiler else 'warming up'}"
    )
    seconds = min(generate(model, tokenizer, cache, f"{name}, {cache} cache: timing")[1] for _ in range(5))
    reports = mla_compile.reports()[before:]
    paths = [[site.path for site in report.sites] for report in reports]
    sites = "; ".join(", ".join(f"{p.count(path)} {path}" for path in dict.fromkeys(p)) for p in paths)
    return Run(name, cache, text, first, TOKENS / seconds, sites or "-")


def print_table(rows: list[Run]) -> None:
    print(f"\n{'compiler':10}{'cache':10}{'first run':>12}{'tokens/s':>12}{'x eager':>10}   sites of each graph")
    for row in rows:
        eager = next(r for r in rows if r.compiler == "eager" and r.cache == row.cache)
        speed = f"{row.tokens_per_second:12.1f}{row.tokens_per_second / eager.tokens_per_second:10.2f}"
        print(f"{row.compiler:10}{row.cache:10}{row.first_seconds:10.1f} s{speed}   {row.sites}")


def print_cache(model: PreTrainedModel) -> None:
    config = model.config
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    layers, size = config.num_hidden_layers, 4
    print(
        f"\ncache, bytes a token over {layers} layers in float32: {latent * layers * size:,} of latents and rope keys; "
        f"{expanded * layers * size:,} if it held the expanded keys and values ({expanded / latent:.1f}x)"
    )


def main() -> None:
    warnings.filterwarnings("ignore", module="torch")
    logging.disable_progress_bar()  # for loading 4 MB
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    runs = [measure(compiler, cache, tokenizer) for cache in CACHES for compiler in COMPILERS]
    print(runs[0].text)
    different = [f"{run.compiler} with a {run.cache} cache" for run in runs if run.text != runs[0].text]
    print_table(runs)
    print_cache(AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32))
    if different:
        raise SystemExit(f"\nnot the text of the eager model: {', '.join(different)}")
    print(f"\nthe same {TOKENS} tokens of text from all {len(runs)} of them")
    print(f"\nthe latest report:\n{mla_compile.last_report()}")


if __name__ == "__main__":
    main()
