"""Time decoding by a whole transformers model on a GPU: eager, stock Inductor and `mla`, over a static cache.

`python -m mla_compile.bench.device_model --batches 1 16 --context 4096`

The model has random weights, DeepSeek-V2-Lite's dims and fewer layers, in bfloat16, and is compiled in place with
`mode="reduce-overhead"`. Each step takes the likeliest token of the one before. Logits of the first steps are compared
with those of the same model in float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mla_compile.bench.check import HALF_FACTOR
from mla_compile.bench.generation.models import MODELS, WholeModel, build
from mla_compile.bench.modes import summary
from mla_compile.bench.progress import log

MODES = ("eager", "inductor", "mla")
_CHECKED, _WARM, _RUNS = 3, 8, 3
"""Steps that are compared with float64; steps before anything is timed; timed runs, of which the fastest counts."""
_PROMPT = 1024
"""Tokens of the prompt that are read at a time."""


@dataclass(frozen=True)
class Row:
    """The result of one mode with one batch."""

    batch: int
    mode: str
    seconds: float | None
    """Of a step, with what the host does between steps."""
    error: float | None
    """The distance of logits from float64's, relative to their norm."""
    note: str = ""


def run(
    whole: WholeModel, batches: Sequence[int], context: int, modes: Sequence[str], device: torch.device, steps: int = 64
) -> list[Row]:
    """Measure each mode with each batch, after a prompt of `context` tokens."""
    whole = replace(whole, layer=replace(whole.layer, dtype="bfloat16"))
    rows: list[Row] = []
    with torch.no_grad():
        for batch in batches:
            model = build(whole).to(device)
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(whole.vocabulary, (batch, context + _CHECKED), generator=generator).to(device)
            log(f"batch {batch}: float64")
            exact = _exact(model, ids, context, steps)
            cache = _prefilled(model, ids, context, steps)
            eager = _distance(_checked(model, ids, context, cache), exact)
            allowed = HALF_FACTOR * max(eager, torch.finfo(torch.bfloat16).eps)
            for mode in modes:
                log(f"batch {batch}: {mode}")
                rows.append(_row(model, mode, ids, context, cache, exact, allowed, steps))
                log(_line(rows[-1], None))
    return rows


def _exact(model: nn.Module, ids: Tensor, context: int, steps: int) -> Tensor:
    exact: Any = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the default takes no float64
    return _checked(exact, ids, context, _prefilled(exact, ids, context, steps))


def _prefilled(model: Any, ids: Tensor, context: int, steps: int) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context + max(steps, _WARM, _CHECKED))
    for first in range(0, context, _PROMPT):
        prompt = ids[:, first : min(first + _PROMPT, context)]
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _rewound(cache: Any, context: int) -> Any:
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)
    return cache


def _checked(model: Any, ids: Tensor, context: int, cache: Any) -> Tensor:
    """Logits of the first steps, `[steps, B, vocabulary]` in float64."""
    _rewound(cache, context)
    tokens = [token.contiguous() for token in ids[:, context:].split(1, 1)]  # strided as those that are written
    found = [model(token, past_key_values=cache, use_cache=True).logits[:, -1].double() for token in tokens]
    return torch.stack(found)


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _row(
    model: Any, mode: str, ids: Tensor, context: int, cache: Any, exact: Tensor, allowed: float, steps: int
) -> Row:
    batch = len(ids)
    torch.compiler.reset()
    compiled = copy.copy(model)  # the same weights; to compile in place leaves the original as it is
    try:
        if mode != "eager":
            compiled.compile(backend=mode, mode="reduce-overhead")
        for _ in range(2):  # a CUDA graph is recorded at the second call
            _checked(compiled, ids, context, cache)
        error = _distance(_checked(compiled, ids, context, cache), exact)
        if not error <= allowed:
            return Row(batch, mode, None, error, f"wrong: rounding explains at most {allowed:.1e}")
        _decode(compiled, ids, context, cache, _WARM)
        seconds = min(_timed(compiled, ids, context, cache, steps) for _ in range(_RUNS))
        return Row(batch, mode, seconds / steps, error)
    except Exception as failure:  # any error of a compiler is a result of the benchmark and must not end it
        return Row(batch, mode, None, None, f"failed: {summary(failure)}")


def _timed(model: Any, ids: Tensor, context: int, cache: Any, steps: int) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    _decode(model, ids, context, cache, steps).cpu()
    return time.perf_counter() - begin


def _decode(model: Any, ids: Tensor, context: int, cache: Any, steps: int) -> Tensor:
    """The last of the tokens `[B, 1]` that are written."""
    _rewound(cache, context)
    token = ids[:, context : context + 1].contiguous()
    for _ in range(steps):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return token


def _line(row: Row, speed_up: float | None) -> str:
    us, tokens = ("-", "-") if row.seconds is None else (f"{row.seconds * 1e6:.0f}", f"{row.batch / row.seconds:.0f}")
    times = "-" if speed_up is None else f"{speed_up:.2f}"
    error = "-" if row.error is None else f"{row.error:.1e}"
    return f"{row.batch:>5}  {row.mode:<9}{us:>9}  {tokens:>9}  {times:>8}  {error}  {row.note}".rstrip()


def as_text(rows: Sequence[Row]) -> str:
    """A line for each row, with the speed-up over stock Inductor."""
    inductor = {row.batch: row.seconds for row in rows if row.mode == "inductor"}
    pairs = [(inductor.get(row.batch), row.seconds) for row in rows]
    speed_ups = [None if base is None or seconds is None else base / seconds for base, seconds in pairs]
    head = f"{'batch':>5}  {'mode':<9}{'us a step':>9}  {'tokens/s':>9}  {'speed-up':>8}  error"
    return "\n".join([head, *map(_line, rows, speed_ups)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mla_compile.bench.device_model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], metavar="B")
    parser.add_argument("--context", type=int, default=4096, metavar="TOKENS", help="tokens in the cache")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU that torch sees, found none (torch {torch.__version__})")
    whole = MODELS["v2-lite"].cut_to(arguments.layers)
    print(as_text(run(whole, arguments.batches, arguments.context, arguments.modes, torch.device("cuda"))))


if __name__ == "__main__":
    main()
