"""Time against length for each mode, with the machine's limit."""

from pathlib import Path

from mla_compile.bench.run import Benchmark
from mla_compile.extras import require

AXIS_LABELS = {"decode": "tokens in the cache", "prefill": "tokens of the prompt"}


def plot(benchmark: Benchmark, path: Path) -> None:
    """Write the figure; its format is that of the name. Raises ImportError, naming the extra, without matplotlib."""
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
    figure.suptitle(f"{layer.name}, N={layer.N}, fp32, {benchmark.cache_kind} cache, {benchmark.device.name}")
    figure.savefig(path)
