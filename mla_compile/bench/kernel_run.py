"""Time the attention ops, and compare them with the machine's limits and with code that does without them.

Copy bandwidth and matmul rate are measured in the same run, on the same device, by the same clock. Results that are not
right are not timed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import mla_compile.kernels.register  # noqa: F401  registers the kernels of the ops
from mla_compile.bench.captured import captured
from mla_compile.bench.check import HALF_FACTOR, distance, too_far
from mla_compile.bench.kernel_cases import Case, Inputs, Kind, L, R, make_inputs
from mla_compile.bench.kernel_peers import calls, plainly, version
from mla_compile.bench.modes import summary
from mla_compile.bench.progress import log
from mla_compile.cost import Device
from mla_compile.fp8 import RowLayout
from mla_compile.kernels._common.tuning import device_seconds
from mla_compile.kernels.coded import dequantised
from mla_compile.text_table import aligned, with_header

Clock = Callable[[Callable[[], Tensor]], float]
"""Returns the seconds of a warm call."""
_CHECKED_KEYS = 1 << 22
"""The number of scores in the part of a problem that is checked against float64: 32 MiB."""
_ITEMSIZE = torch.bfloat16.itemsize
"""Bytes of an element in the dtype whose bandwidth is reported."""
_SUM = (L + R) ** 0.5 * torch.finfo(torch.float32).eps
"""The rounding error of a score, a float32 sum of L + R products of magnitude 1."""


@dataclass(frozen=True)
class Result:
    """One way to compute one case."""

    case: Case
    peer: str
    status: str
    """`ok`, `wrong`, `failed` or `skipped`."""
    note: str = ""
    seconds: float | None = None
    error: float | None = None
    """The largest distance from float64 in the part that is checked, relative to the largest value."""


def run(
    cases: Sequence[Case],
    peers: Sequence[str],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    clock: Clock | None = None,
    progress: Callable[[Device, list[Result]], None] = lambda *_: None,
) -> tuple[Device, list[Result]]:
    """Measure the first peer in all cases, then the others, which may have to compile for each case.

    After each case the results so far go to `progress`; the names of cases go to standard error. `clock` defaults to
    the device's own.
    """
    clock = clock or (device_clock if device.type == "cuda" else host_clock)
    results: list[Result] = []
    with torch.no_grad():
        limits = limits_of(device, dtype, clock)
        for some in (peers[:1], peers[1:]):
            for case in cases if some else ():
                log(case, *some)
                results += _measure(case, some, device, dtype, clock)
                results.sort(key=lambda result: cases.index(result.case))
                progress(limits, results)
    return limits, results


QUICK = (
    Case("decode", 64, 1, 8192, 16),
    Case("decode", 16, 1, 32768, 128),
    Case("decode", 1, 1, 131072, 16),
    Case("decode", 1, 1, 131072, 128),
    Case("prefill", 1, 4096, 4096, 128),
    Case("decode", 64, 1, 8192, 16, fp8=True),
    Case("decode", 16, 1, 32768, 128, fp8=True),
    Case("decode", 256, 1, 1024, 16),
    Case("decode", 16, 4, 8192, 16),
    Case("decode", 16, 2, 8192, 128),
    Case("sparse", 64, 1, 32768, 128, fp8=True),
    Case("prefill", 1, 16384, 16384, 16),
    Case("train", 1, 4096, 4096, 128),
)
"""Some cases of each kind, the most important first."""


def grid(
    kinds: Sequence[Kind],
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    heads: Sequence[int],
    queries: Sequence[int],
    fp8: Sequence[bool],
) -> Iterator[Case]:
    """All combinations; prefill and train always have one prompt."""
    for kind in kinds:
        for N in heads:
            if kind in ("prefill", "train"):
                yield from (Case(kind, 1, tokens, tokens, N) for tokens in prompts)
                continue
            for small in fp8:
                yield from (Case(kind, B, Sq, T, N, small) for B in batches for T in contexts for Sq in queries)


def limits_of(device: torch.device, dtype: torch.dtype, clock: Clock) -> Device:
    """FLOP/s of a matrix product and bytes/s, reads plus writes, of a kernel that reads and writes as a copy does.

    That kernel changes the sign. A copy proper becomes a memcpy node of a CUDA graph, which is no kernel and slower:
    on an H200 2,750 GB/s, where this kernel reaches 4,250 and the same copy outside of a graph 4,270.
    """
    size, count = (8192, 1 << 29) if device.type == "cuda" else (256, 1 << 22)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / clock(lambda: a @ b)
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Device(name, flops, 2 * source.nbytes / clock(lambda: torch.neg(source, out=target)))


def device_clock(call: Callable[[], Tensor]) -> float:
    """The median over at least 100 ms of calls by CUDA events, with the L2 cache flushed before each call.

    A call that can be captured in a CUDA graph is replayed, so that the host's launch time does not count.
    """
    return device_seconds(captured(call) or call, warmup=25, rep=100)


def host_clock(call: Callable[[], object]) -> float:
    """The median of three calls after a warm-up call."""
    call()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _measure(case: Case, peers: Sequence[str], device: torch.device, dtype: torch.dtype, clock: Clock) -> list[Result]:
    torch.compiler.reset()  # each case is compiled separately, and torch compiles a function at most 8 times
    try:
        inputs = make_inputs(case, device, dtype)
        exact, measure = _truth(inputs)
    except torch.OutOfMemoryError:
        return [Result(case, peer, "skipped", "the inputs need more memory than is available") for peer in peers]
    made = calls(inputs, peers)
    return [_one(inputs, peer, make, exact, measure, clock) for peer, make in made.items()]


def _one(
    x: Inputs, peer: str, make: Callable[[], Callable[[], Tensor]], exact: Tensor, measure: float, clock: Clock
) -> Result:
    try:
        call = make()
        error = distance(_part(x.case, call()), exact)
        allowed = max(HALF_FACTOR * max(measure, _SUM), torch.finfo(x.q.dtype).eps)
        if not error <= allowed:
            return Result(x.case, peer, "wrong", too_far(error, allowed), error=error)
        return Result(x.case, peer, "ok", "", clock(call), error)
    except torch.OutOfMemoryError:
        return Result(x.case, peer, "skipped", "needs more memory than is available")
    except Exception as failure:  # any error of a compiler is a result of the benchmark and must not end it
        return Result(x.case, peer, "failed", summary(failure))


def _slices(case: Case) -> tuple[int, int]:
    """The number of last queries and of first heads of the first sequence that are checked."""
    heads = min(case.N, 16)
    return max(min(case.Sq, _CHECKED_KEYS // (heads * case.T)), 1), heads


def _part(case: Case, o: Tensor) -> Tensor:
    queries, heads = _slices(case)
    return o[0, case.Sq - queries :, :heads]


def _truth(x: Inputs) -> tuple[Tensor, float]:
    """The checked part in float64, and the error of the plain equation in the dtype of the inputs."""
    queries, heads = _slices(x.case)
    case = Case(x.case.kind, 1, queries, x.case.T, heads)

    def part(dtype: torch.dtype) -> Tensor:
        return plainly(
            Inputs(
                case,
                x.q[:1, x.case.Sq - queries :, :heads].to(dtype),
                _cache(x, dtype),
                None,
                x.table[:1],
                x.lengths[:1],
                None if x.indices is None else x.indices[:1, x.case.Sq - queries :],
                None if x.weight is None else x.weight[:heads].to(dtype),
                None if x.direction is None else x.direction[:1, x.case.Sq - queries :, :heads].to(dtype),
            )
        )()[0]

    exact = part(torch.float64)
    return exact, distance(part(x.q.dtype), exact)


def _cache(x: Inputs, dtype: torch.dtype) -> Tensor:
    """The first sequence's latents and rope keys, `[1, T, L + R]`; in FP8, the dequantised values."""
    if x.rows is None:
        return x.cache[:1].to(dtype)
    numbers, scales, ropes = RowLayout(L, R, x.q.dtype).views(x.rows[: x.table.shape[1]])
    return torch.cat(dequantised(numbers, ropes, scales, dtype), dim=-1).flatten(0, 1)[None]


def rows(device: Device, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A flat row for each result, with None for what was not measured."""
    table = []
    for result in results:
        case, seconds = result.case, result.seconds
        moved, flops = case.bytes(_ITEMSIZE), case.flops
        limit = max(moved / device.bytes_per_s, flops / device.flops_per_s)
        table.append(
            asdict(case)
            | {
                "peer": result.peer,
                "status": result.status,
                "us": None if seconds is None else seconds * 1e6,
                "gb_per_s": None if seconds is None else moved / seconds / 1e9,
                "tflop_per_s": None if seconds is None else flops / seconds / 1e12,
                "of_limit": None if seconds is None else limit / seconds,
                "bound": "memory" if moved / device.bytes_per_s >= flops / device.flops_per_s else "compute",
                "error": result.error,
                "note": result.note,
                "version": version(result.peer),
            }
        )
    return table


def as_text(device: Device, results: Sequence[Result]) -> str:
    """The results as a table, with the limits above it."""
    head = ("case", "peer", "us", "GB/s", "TFLOP/s", "of limit", "bound", "error", "")
    sides = "<" + ">" * (len(head) - 2) + "<"
    cells = [list(head)]
    for result, row in zip(results, rows(device, results), strict=True):
        numbers = [row[name] for name in ("us", "gb_per_s", "tflop_per_s", "of_limit")]
        formats = (".1f", ".0f", ".1f", ".0%")
        shown = ["-" if n is None else format(n, f) for n, f in zip(numbers, formats, strict=True)]
        error = "-" if result.error is None else f"{result.error:.0e}"
        note = "" if result.status == "ok" else f"{result.status}: {result.note}"
        cells.append([str(result.case), result.peer, *shown, row["bound"], error, note])
    versions = ", ".join(dict.fromkeys(version(result.peer) for result in results))
    rates = f"copy {device.bytes_per_s / 1e9:.0f} GB/s, matmul {device.flops_per_s / 1e12:.1f} TFLOP/s"
    return "\n".join([f"{device.name}: {rates}, measured in this run; {versions}", *aligned(cells, sides)])


def as_csv(device: Device, results: Sequence[Result]) -> str:
    """The rows as CSV, with a header."""
    return with_header(rows(device, results))


def as_json(device: Device, results: Sequence[Result]) -> str:
    """The device and its limits, and the rows, as JSON."""
    return json.dumps({"device": asdict(device), "rows": rows(device, results)}, indent=1)
