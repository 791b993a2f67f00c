"""Draw the crossover plot as SVG: times of the paths over the number of queries, with a panel for each context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ..units import in_seconds, in_tokens
from .costs import Curve, style

WIDTH, HEIGHT = 268.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 26.0, 34.0


def draw_curves(curves: Sequence[Curve]) -> str:
    """A panel for each curve, all with the same scales."""
    times = [t for curve in curves for point in curve.points for t in point.seconds.values()]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    last = max(curve.points[-1].queries for curve in curves)

    def across(queries: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(queries) / math.log(last)

    def up(seconds: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(seconds)) / max(high - low, 1)

    grid = _grid(range(low, high + 1), last, across, up)
    return "".join(_panel(curve, grid, across, up) for curve in curves)


def _grid(decades: range, last: int, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    lines = []
    step = max(1, len(decades) // 5)
    for decade in decades[::step]:
        y = up(10.0**decade)
        lines.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick y" x="{LEFT - 6:g}" y="{y + 3.5:.1f}">{in_seconds(10.0**decade)}</text>')
    for queries in (1, 16, 256, 4096):
        if queries <= last:
            x = across(queries)
            lines.append(f'<text class="tick x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15:g}">{queries:,}</text>')
    lines.append(f'<text class="tick x" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 5:g}">queries, Sq</text>')
    return "".join(lines)


def _panel(curve: Curve, grid: str, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    lines = []
    first, *_ = paths = list(curve.points[0].seconds)
    for path in paths:
        steps = " ".join(f"{across(p.queries):.1f},{up(p.seconds[path]):.1f}" for p in curve.points)
        lines.append(f'<polyline class="line {style(path)}" points="{steps}"/>')
    bottom = HEIGHT - BOTTOM
    if curve.crossing is not None:
        x = across(curve.crossing)
        anchor = ' class="note end"' if x > WIDTH * 0.6 else ' class="note"'
        shift = -5 if x > WIDTH * 0.6 else 5
        faster = next(point.faster for point in curve.points if point.queries >= curve.crossing)
        words = f"{faster} for any" if curve.crossing == 1 else f"{faster} from {curve.crossing:,}"
        lines.append(f'<line class="crossing" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{bottom:g}"/>')
        lines.append(f'<text{anchor} x="{x + shift:.1f}" y="{TOP + 10:g}">{words}</text>')
    else:
        lines.append(f'<text class="note" x="{LEFT + 6:g}" y="{TOP + 10:g}">{first} for all</text>')
    label = f"Predicted times at a context of {curve.context} tokens"
    if curve.here is not None:
        here = curve.here
        seconds = here.seconds[here.faster]
        told = f"this attention: Sq={here.queries}, {here.faster}, {in_seconds(seconds)}"
        lines.append(
            f'<circle class="here {style(here.faster)}" cx="{across(here.queries):.1f}" cy="{up(seconds):.1f}" r="5.5">'
            f"<title>{escape(told)}</title></circle>"
        )
        label += f"; {told}"
    title = "no context" if curve.context == 0 else f"context {in_tokens(curve.context)}"
    mark = '<tspan class="own">  this attention’s</tspan>' if curve.here is not None else ""
    return (
        f'<svg class="panel" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">'
        f'<text class="name" x="{LEFT:g}" y="15">{title}{mark}</text>{grid}{"".join(lines)}</svg>'
    )
