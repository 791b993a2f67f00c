"""Plot memory against context length, with a line for each layout."""

from __future__ import annotations

from pathlib import Path

from ..optional_packages import require
from ..units import in_units
from .table import MemoryPlan

FEWEST_TOKENS = 1024
"""The start of the context axis, unless the plan's own context is shorter."""


def plot(plan: MemoryPlan, path: Path) -> None:
    """Write the figure in the format that the file name's suffix says."""
    require("matplotlib.figure", "plot", "--plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    contexts = [plan.context]
    while contexts[0] > FEWEST_TOKENS:
        contexts.insert(0, max(contexts[0] // 2, FEWEST_TOKENS))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for layout in plan.layouts:
        sizes = [plan.batch * layout.sequence_bytes(plan.model, context) for context in contexts]
        axes.plot(contexts, sizes, marker="o", markersize=3, label=f"{layout.name}, {in_units(sizes[-1])}")
    if plan.memory is not None:
        axes.axhline(plan.memory, color="black", linestyle="--", linewidth=1, label=f"{in_units(plan.memory)} in all")
    axes.set(xscale="log", yscale="log", xlabel="tokens of each sequence", ylabel="bytes of the cache")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}k"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: in_units(int(number))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_title(f"{plan.model.name}, {plan.sequences}, {plan.dtype}")
    figure.savefig(path)
