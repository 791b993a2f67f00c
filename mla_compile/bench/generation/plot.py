"""Plot tokens per second against length, with the machine's limit."""

from pathlib import Path

from mla_compile.bench.generation.run import Generation
from mla_compile.bench.generation.table import rows
from mla_compile.optional_packages import require


def plot(generation: Generation, path: Path) -> None:
    """Write the figure: tokens/s against length, with a panel for each kind and batch, and a line for each way.

    The file name's suffix gives the format. Raises ImportError, naming the extra, if matplotlib is not installed.
    """
    require("matplotlib.figure", "plot", "--plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    table = rows(generation)
    panels = list(dict.fromkeys((row["workload"], row["batch"]) for row in table))
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        here = [row for row in table if (row["workload"], row["batch"]) == panel]
        for way in dict.fromkeys((row["compiler"], row["cache"]) for row in here):
            mine = [row for row in here if (row["compiler"], row["cache"]) == way and row["tokens_per_second"]]
            if mine:
                points = sorted((row["tokens"], row["tokens_per_second"]) for row in mine)
                axes.plot(*zip(*points, strict=True), marker="o", label=", ".join(way))
        most = sorted({(row["tokens"], row["limit_tokens_per_second"]) for row in here})
        axes.plot(*zip(*most, strict=True), color="black", linestyle="--", marker="_", label="limit of the machine")
        kind, batch = panel
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="tokens/s", title=f"{kind}, batch {batch}")
        axes.set_xticks([tokens for tokens, _ in most], [str(tokens) for tokens, _ in most])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    whole = generation.whole
    figure.suptitle(f"{whole.layer.name}, {whole.layers} layers, {whole.layer.dtype}, {generation.device.name}")
    figure.savefig(path)
