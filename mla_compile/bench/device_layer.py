"""Time one decode step of an unmodified transformers layer on a GPU: eager, absorbed by hand, stock Inductor and `mla`.

`python -m mla_compile.bench.device_layer --layer v3 --contexts 4096 32768 --csv layer.csv`

There is one sequence in a static cache, in bfloat16, compiled with `mode="reduce-overhead"`, so that Inductor records
the step in a CUDA graph. Each output is checked against float64 before it is timed. Each result goes to standard error,
and to the CSV file, as soon as it is measured, in case the run is cut short.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mla_compile.bench.check import HALF_FACTOR, distance
from mla_compile.bench.layers import LAYERS, Built, Layer, build
from mla_compile.bench.modes import MODES, Step, summary
from mla_compile.bench.progress import log
from mla_compile.bench.workloads import Workload, make_inputs
from mla_compile.cache.argument import cache_argument, cache_of
from mla_compile.kernels._common.tuning import device_seconds
from mla_compile.parsing import file
from mla_compile.text_table import with_header


@dataclass(frozen=True)
class Row:
    """The result of one mode at one context."""

    context: int
    mode: str
    seconds: float | None
    error: float | None
    """The largest distance from float64, relative to the largest element."""
    note: str = ""


def run(
    layer: Layer,
    contexts: Sequence[int],
    modes: Sequence[str],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    clock: Callable[[Callable[[], object]], float] | None = None,
    progress: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure; `clock` defaults to the device's own. Compiled modes are recompiled for each context.

    After each mode the results so far go to `progress`; what is measured, and its result, to standard error.
    """
    log(f"{layer.name}: weights")
    built = build(layer, device)
    built = replace(built, attention=built.attention.to(dtype))
    rows: list[Row] = []
    with torch.no_grad():
        for context in contexts:
            log(f"{layer.name}, context {context}: float64")
            torch.compiler.reset()
            exact_built = replace(built, attention=copy.deepcopy(built.attention).double())
            exact = _once(exact_built, MODES["by-hand"](exact_built), context, device, torch.float64)
            eager = distance(_once(built, MODES["eager"](built), context, device, dtype), exact)
            del exact_built
            allowed = HALF_FACTOR * max(eager, torch.finfo(dtype).eps)
            for mode in modes:
                log(f"{layer.name}, context {context}: {mode}")
                rows.append(_row(built, mode, context, device, dtype, exact, allowed, clock or _seconds))
                log(_line(rows[-1], None))
                progress(rows)
    return rows


def _row(
    built: Built,
    mode: str,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    exact: Tensor,
    allowed: float,
    clock: Callable[[Callable[[], object]], float],
) -> Row:
    try:
        step = _compiled(built, mode) if mode in ("inductor", "mla") else MODES[mode](built)
        call = _call(built, step, context, device, dtype)
        for _ in range(2):  # a CUDA graph is recorded at the second call
            call()
        error = distance(call(), exact)
        if not error <= allowed:
            return Row(context, mode, None, error, f"wrong: rounding explains at most {allowed:.1e}")
        return Row(context, mode, clock(call), error)
    except Exception as failure:  # any error of a compiler is a result of the benchmark and must not end it
        return Row(context, mode, None, None, f"failed: {summary(failure)}")


class _Decode(nn.Module):
    """The layer together with the mask that transformers' models make from their cache. Compiled together, the mask is
    recognised as a length."""

    def __init__(self, built: Built) -> None:
        from transformers.masking_utils import create_causal_mask

        super().__init__()
        self.attention, self.config = built.attention, built.config
        self.attention_argument = cache_argument(built.attention.forward)
        self.masks_argument = cache_argument(create_causal_mask)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, cache: Any) -> Tensor:
        from transformers.masking_utils import create_causal_mask

        position = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        mask: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=None,
            position_ids=(position + cache.get_seq_length())[None],
            **{self.masks_argument: cache},
        )
        arguments = {"position_embeddings": position_embeddings, self.attention_argument: cache}
        output: Tensor = self.attention(hidden_states=hidden_states, attention_mask=mask, **arguments)[0]
        return output


def _compiled(built: Built, backend: str) -> Step:
    compiled = torch.compile(_Decode(built), backend=backend, mode="reduce-overhead")

    def step(arguments: Mapping[str, Any]) -> Tensor:
        given = {name: arguments[name] for name in ("hidden_states", "position_embeddings")}
        output: Tensor = compiled(**given, cache=cache_of(arguments))
        return output

    return step


def _call(built: Built, step: Step, context: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call of the step that always writes to the same place of a static cache."""
    arguments = make_inputs(built, Workload("decode", context), "static", dtype, device=device).arguments()
    written: Any = cache_of(arguments).layers[0].cumulative_length

    def call() -> Tensor:
        written.fill_(context)
        return step(arguments)

    return call


def _once(built: Built, step: Step, context: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _call(built, step, context, device, dtype)().double()


def _seconds(call: Callable[[], object]) -> float:
    """The median by CUDA events, with the L2 cache flushed before each call. Host overhead counts."""
    return device_seconds(call, warmup=25, rep=100)


def _line(row: Row, speed_up: float | None) -> str:
    time = "-" if row.seconds is None else f"{row.seconds * 1e6:.1f}"
    times = "-" if speed_up is None else f"{speed_up:.2f}"
    error = "-" if row.error is None else f"{row.error:.0e}"
    return f"{row.context:>8}  {row.mode:<9}{time:>9}  {times:>8}  {error}  {row.note}".rstrip()


def _speed_ups(rows: Sequence[Row]) -> list[float | None]:
    """For each row, the time of stock Inductor over its own; None where one of them is not known."""
    inductor = {row.context: row.seconds for row in rows if row.mode == "inductor"}
    pairs = [(inductor.get(row.context), row.seconds) for row in rows]
    return [None if base is None or seconds is None else base / seconds for base, seconds in pairs]


def as_text(rows: Sequence[Row]) -> str:
    """A line for each row, with the speed-up over stock Inductor."""
    head = f"{'context':>8}  {'mode':<9}{'us':>9}  {'speed-up':>8}  error"
    return "\n".join([head, *map(_line, rows, _speed_ups(rows))])


def as_csv(rows: Sequence[Row]) -> str:
    """The same as CSV, with a header."""
    return with_header(
        [
            {
                "context": row.context,
                "mode": row.mode,
                "us": None if row.seconds is None else row.seconds * 1e6,
                "speed_up": speed_up,
                "error": row.error,
                "note": row.note,
            }
            for row, speed_up in zip(rows, _speed_ups(rows), strict=True)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mla_compile.bench.device_layer")
    parser.add_argument("--layer", choices=LAYERS, default="v3")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768], metavar="TOKENS")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--csv", type=file, metavar="FILE", help="write a row for each result, as soon as it is there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU that torch sees, found none (torch {torch.__version__})")

    def write(rows: list[Row]) -> None:
        if arguments.csv:
            arguments.csv.write_text(as_csv(rows))

    device, layer = torch.device("cuda"), LAYERS[arguments.layer]
    print(as_text(run(layer, arguments.contexts, arguments.modes, device, progress=write)))


if __name__ == "__main__":
    main()
