"""Plot what bounds the step time on the fastest meshes, and the step time against the number of devices."""

from __future__ import annotations

from pathlib import Path

from ..optional_packages import require
from .plan import ClusterPlan
from .step import BOUNDS


def plot(plan: ClusterPlan, path: Path, rows: int) -> None:
    """Write the figure in the format that the file name's suffix says."""
    require("matplotlib.figure", "plot", "--plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    bars, line = figure.subplots(1, 2)
    steps = plan.steps[:rows][::-1]
    names = [str(step.mesh) for step in steps]
    left = [0.0] * len(steps)
    for bound in BOUNDS:
        widths = [1000 * step.seconds[bound] for step in steps]
        bars.barh(names, widths, left=left, label=bound)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    bars.set(xlabel="ms of a step", title=f"{plan.devices:,} devices")
    bars.legend()
    found = [(fewer.devices, fewer.steps[0]) for fewer in plan.scaled() if fewer.steps]
    counts = [count for count, _ in found]
    line.plot(counts, [1000 * step.time for _, step in found], marker="o", label="all")
    for bound in BOUNDS:
        line.plot(counts, [1000 * step.seconds[bound] for _, step in found], linewidth=1, label=bound)
    line.set(xscale="log", yscale="symlog", xlabel="devices", ylabel="ms of a step", title="the fastest mesh")
    line.set_ylim(bottom=0)
    for axis in (line.xaxis, line.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    line.grid(alpha=0.3)
    line.legend()
    figure.suptitle(f"{plan.model.caches.name}, {plan.task.batch:,} of {plan.task.context:,} tokens")
    figure.savefig(path)
