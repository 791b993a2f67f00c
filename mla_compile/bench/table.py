"""Format the benchmark as text, CSV and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mla_compile.bench.breakdown import Breakdown
from mla_compile.bench.measure import Result
from mla_compile.bench.modes import DESCRIPTIONS
from mla_compile.bench.run import Benchmark
from mla_compile.bench.workloads import Workload
from mla_compile.text_table import aligned, with_header

LEGEND = """\
ms       median wall time of a call, compiled and warm, calls of the modes alternating; in brackets the quartiles
limit    the larger of FLOPs at the GEMM rate and bytes (weights, latent cache, input, output once) at the copy rate;
         calls whose data stays in the processor's caches can be faster than that
speed-up the median of stock Inductor, divided by that of the mode
peak     growth of resident memory during one call, in a process of its own
error    largest distance from float64 in output and cache, relative to the largest element"""


def rows(benchmark: Benchmark) -> list[dict[str, Any]]:
    """A flat row for each mode of each workload; times are in milliseconds, and None if not measured."""
    inductor = {r.workload: r.median for r in benchmark.results if r.mode == "inductor"}
    return [_row(benchmark, result, inductor.get(result.workload)) for result in benchmark.results]


def _row(benchmark: Benchmark, result: Result, inductor: float | None) -> dict[str, Any]:
    limit, median = benchmark.limits[result.workload], result.median
    low, high = result.quartiles or (None, None)
    return {
        "layer": benchmark.layer.name,
        "dtype": benchmark.layer.dtype,
        "cache": benchmark.cache_kind,
        "workload": result.workload.kind,
        "tokens": result.workload.tokens,
        "mode": result.mode,
        "status": result.status,
        "ms": _milliseconds(median),
        "ms_first_quartile": _milliseconds(low),
        "ms_third_quartile": _milliseconds(high),
        "limit_ms": _milliseconds(limit),
        "times_limit": median / limit if median else None,
        "speed_up": inductor / median if median and inductor else None,
        "peak_mib": result.peak_bytes / 2**20 if result.peak_bytes is not None else None,
        "error": result.error,
        "note": result.note,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def as_csv(benchmark: Benchmark) -> str:
    """The rows as CSV, with a header."""
    return with_header(rows(benchmark))


def as_json(benchmark: Benchmark) -> str:
    """The machine, the layer, the rows, the breakdowns and every single time (both in seconds) as JSON."""
    return json.dumps(
        {
            "device": asdict(benchmark.device),
            "load": benchmark.load,
            "layer": asdict(benchmark.layer),
            "rows": [
                row | {"seconds": result.seconds}
                for row, result in zip(rows(benchmark), benchmark.results, strict=True)
            ],
            "breakdowns": [asdict(breakdown) for breakdown in benchmark.breakdowns],
        },
        indent=1,
    )


def as_text(benchmark: Benchmark) -> str:
    """A table for each workload, then the breakdown of the time."""
    layer, device = benchmark.layer, benchmark.device
    query_rank = "" if layer.Lq is None else f" Lq={layer.Lq}"
    lines = [
        f"{device.name}: GEMM {device.flops_per_s / 1e9:.3g} GFLOP/s, copy {device.bytes_per_s / 1e9:.3g} GB/s, "
        f"{layer.dtype}, best of this run; load average before it {benchmark.load:.1f}",
        f"{layer.name} ({layer.model_type}): hidden {layer.hidden}, N={layer.N}{query_rank} L={layer.L} P={layer.P} "
        f"R={layer.R} V={layer.V}; one layer, one sequence, {benchmark.cache_kind} cache",
        *(f"{mode:<9}{text}" for mode, text in DESCRIPTIONS.items() if any(r.mode == mode for r in benchmark.results)),
        LEGEND,
    ]
    table = rows(benchmark)
    for workload in benchmark.limits:
        chosen = [row for row in table if (row["workload"], row["tokens"]) == (workload.kind, workload.tokens)]
        lines += ["", f"{workload}: limit {1000 * benchmark.limits[workload]:.3g} ms", *_workload_table(chosen)]
    return "\n".join([*lines, "", *_breakdown_table(benchmark.breakdowns)])


def _workload_table(chosen: Sequence[dict[str, Any]]) -> list[str]:
    header = ["mode", "ms", "", "x limit", "speed-up", "peak MiB", "error", ""]
    cells = [header]
    for row in chosen:
        if row["ms"] is None:
            cells.append([row["mode"], "-", "", "-", "-", "-", "-", f"{row['status']}: {row['note']}"])
            continue
        low, high = row["ms_first_quartile"], row["ms_third_quartile"]
        cells.append(
            [
                row["mode"],
                f"{row['ms']:.4g}",
                "" if low is None else f"[{low:.4g} {high:.4g}]",
                f"{row['times_limit']:.3g}",
                _number(row["speed_up"], ".3g"),
                _number(row["peak_mib"], ".0f"),
                f"{row['error']:.0e}",
                row["note"],
            ]
        )
    return aligned(cells, "<>")


def _number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _breakdown_table(breakdowns: Sequence[Breakdown]) -> list[str]:
    if not breakdowns:
        return []
    workloads: list[Workload] = [breakdown.workload for breakdown in breakdowns]
    cells = [["ms", *(f"{w.kind} {w.tokens}" for w in workloads)]]
    for stage in breakdowns[0].stages:
        cells.append([stage, *(f"{1000 * b.stages[stage]:.3g}" for b in breakdowns)])
    cells.append(["sum of the stages", *(f"{1000 * sum(b.stages.values()):.3g}" for b in breakdowns)])
    cells.append(["the layer", *(f"{1000 * b.whole:.3g}" for b in breakdowns)])
    return [
        "where the time goes: stages of the layer absorbed by hand, each timed alone, median ms",
        *aligned(cells, "<>"),
    ]
