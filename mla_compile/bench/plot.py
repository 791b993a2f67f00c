"""Plot time against length for each mode, with the machine's limit; for kernels, the achieved share of the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.optional_packages import require

if TYPE_CHECKING:
    from mla_compile.bench.kernel_run import Result
    from mla_compile.bench.run import Benchmark
    from mla_compile.cost import Device

AXIS_LABELS = {"decode": "tokens in the cache", "prefill": "tokens of the prompt"}


def plot(benchmark: Benchmark, path: Path) -> None:
    """Write the figure in the format of the file name's suffix.

    Raises ImportError, naming the extra, if matplotlib is not installed.
    """
    require("matplotlib.figure", "plot", "--plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    kinds = list(dict.fromkeys(workload.kind for workload in benchmark.limits))
    figure = Figure(figsize=(6 * len(kinds), 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for mode in dict.fromkeys(result.mode for result in benchmark.results):
            points = [
                (r.workload.tokens, 1000 * r.median)
                for r in benchmark.results
                if r.mode == mode and r.workload.kind == kind and r.median is not None
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=mode)
        limits = sorted((w.tokens, 1000 * seconds) for w, seconds in benchmark.limits.items() if w.kind == kind)
        axes.plot(*zip(*limits, strict=True), color="black", linestyle="--", marker="_", label="limit of the machine")
        axes.set(xscale="log", yscale="log", xlabel=AXIS_LABELS[kind], ylabel="ms", title=f"one {kind} call")
        axes.set_xticks([tokens for tokens, _ in limits], [str(tokens) for tokens, _ in limits])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend()
    layer = benchmark.layer
    figure.suptitle(f"{layer.name}, N={layer.N}, {layer.dtype}, {benchmark.cache_kind} cache, {benchmark.device.name}")
    figure.savefig(path)


def plot_kernels(device: Device, results: Sequence[Result], path: Path) -> None:
    """Write the figure: a row for each batch, a column for each kernel, number of heads and dtype, a line for each
    peer.

    If there are several numbers of queries, the smallest is plotted. Raises ImportError, naming the extra, if
    matplotlib is not installed.
    """
    require("matplotlib.figure", "plot", "--plot")
    from matplotlib.figure import Figure

    from mla_compile.bench.kernel_run import rows

    table = [row for row in rows(device, results) if row["of_limit"] is not None]
    panels: dict[tuple[object, ...], dict[int, list[dict[str, object]]]] = {}
    for row in table:
        panels.setdefault((row["kind"], row["N"], row["fp8"]), {}).setdefault(row["B"], []).append(row)
    batches = sorted({row["B"] for row in table})
    figure = Figure(figsize=(4 * max(len(panels), 1), 3 * max(len(batches), 1)), layout="constrained")
    grid = figure.subplots(max(len(batches), 1), max(len(panels), 1), squeeze=False)
    for k, ((kind, heads, fp8), by_batch) in enumerate(panels.items()):
        for axes, batch in zip(grid[:, k], batches, strict=True):
            found = by_batch.get(batch, [])
            if not found:
                axes.set_axis_off()
                continue
            for peer in dict.fromkeys(row["peer"] for row in found):
                shares: dict[object, object] = {}
                for row in sorted((row for row in found if row["peer"] == peer), key=lambda row: -int(str(row["Sq"]))):
                    shares[row["T"]] = row["of_limit"]
                points = sorted(shares.items(), key=lambda point: int(str(point[0])))
                axes.plot(*zip(*points, strict=True), marker="o", label=peer)
            axes.set(xscale="log", ylim=(0, 1.05), title=f"{kind} B={batch} N={heads} {'fp8' if fp8 else 'bf16'}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    figure.supxlabel("tokens")
    figure.supylabel("share of the limit")
    figure.suptitle(device.name)
    figure.savefig(path)
