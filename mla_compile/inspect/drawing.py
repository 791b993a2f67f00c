"""Draw a sketch as SVG. It has only CSS classes: colours, fonts and dark mode come from the page's style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from .layers import HEIGHT, Layout, Place, arrange
from .sketch import Arrow, Box, Sketch

Points = list[tuple[float, float]]
Frame = tuple[float, float, float, float]
"""Left, top, right, bottom."""

MARGIN = 14.0
THINNEST, THICKEST = 1.4, 9.0
LETTER, LINE = 6.1, 15.0
"""The width of a letter and the height of a line of a label, in pixels."""


@dataclass
class Room:
    """The areas that labels should not hide."""

    boxes: list[Frame]
    arrows: dict[Arrow, list[Frame]]
    labels: list[Frame] = field(default_factory=list)

    def hidden(self, frame: Frame) -> int:
        """How bad a label's place is: overlapping labels count most, then boxes, then pieces of arrows."""
        arrows = sum(_overlap(frame, sample) for samples in self.arrows.values() for sample in samples)
        return (
            arrows
            + 40 * sum(_overlap(frame, f) for f in self.boxes)
            + 80 * sum(_overlap(frame, f) for f in self.labels)
        )


def draw(sketch: Sketch, largest: int, label: str) -> str:
    """The SVG of a sketch. Arrows are thicker the more bytes their tensors have, up to `largest`.

    `label` describes the drawing in words, for screen readers.
    """
    layout = arrange(sketch)
    paths, labels, room = _arrows(sketch, layout, largest)
    boxes = [_box(box, layout.places[key]) for key, box in sketch.boxes.items()]
    left = min([0.0, *(frame[0] for frame in room.labels)]) - MARGIN
    width = max([layout.width, *(frame[2] for frame in room.labels)]) + MARGIN - left
    height = layout.height + 2 * MARGIN
    return (
        f'<svg class="sketch" viewBox="{left:.0f} {-MARGIN:.0f} {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px" role="img" aria-label="{escape(label)}">'
        + "".join([*paths, *boxes, *labels])
        + "</svg>"
    )


def _box(box: Box, place: Place) -> str:
    left = place.x - place.width / 2
    middle = place.y + (place.height / 2 + 4.5 if not box.detail else 18)
    shape = "entrance" if box.entrance else "operation"
    text = f'<text class="title" x="{place.x:.1f}" y="{middle:.1f}">{escape(box.title)}</text>'
    if box.detail:
        text += f'<text class="detail" x="{place.x:.1f}" y="{place.y + 33:.1f}">{escape(box.detail)}</text>'
    corner = HEIGHT / 2 if box.entrance else 7
    return (
        f'<g class="box {shape} {box.kind}"><rect x="{left:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{place.height:.1f}" rx="{corner:g}"/>{text}</g>'
    )


def _arrows(sketch: Sketch, layout: Layout, largest: int) -> tuple[list[str], list[str], Room]:
    """The paths, thickest first so that none hides another, and labels where there is room."""
    ends = _ports(sketch, layout)
    points = {arrow: _points(arrow, layout, ends) for arrow in sketch.arrows}
    thickness = {arrow: _thickness(arrow, largest) for arrow in sketch.arrows}
    places = [
        _frame(place.x, place.y + place.height / 2, place.width, place.height) for place in layout.places.values()
    ]
    room = Room(places, {arrow: _samples(points[arrow], thickness[arrow]) for arrow in sketch.arrows})
    paths: list[str] = []
    labels: list[str] = []
    for arrow in sorted(sketch.arrows, key=lambda a: -a.bytes):
        paths.append(_path(arrow, points[arrow], thickness[arrow]))
        labels.append(_label(arrow, points[arrow], thickness[arrow], room))
    return paths, labels, room


def _path(arrow: Arrow, points: Points, thickness: float) -> str:
    steps = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        steps.append(f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
    x, y = points[-1]
    head = 3.4 + thickness / 2
    tip = f"M{x:.1f} {y + 7:.1f}l{-head:.1f} -8h{2 * head:.1f}z"
    told = f"{arrow.dtype} {arrow.shape}, {arrow.bytes:,} bytes"
    return (
        f'<g class="arrow {arrow.kind}"><title>{escape(told)}</title>'
        f'<path d="{" ".join(steps)}" stroke-width="{thickness:.1f}"/><path class="tip" d="{tip}"/></g>'
    )


def _ports(sketch: Sketch, layout: Layout) -> dict[tuple[Arrow, str], float]:
    """Where on a box's edge each arrow begins or ends: side by side, ordered by the place to which it leads next."""
    found: dict[tuple[Arrow, str], float] = {}
    for key, place in layout.places.items():
        for side in ("start", "end"):
            mine = [a for a in sketch.arrows if getattr(a, side) == key]
            mine.sort(key=lambda a: _next(a, side, layout).x)
            for number, arrow in enumerate(mine, 1):
                reach = min(place.width - 30, 46 * len(mine))
                found[arrow, side] = place.x + reach * (number / (len(mine) + 1) - 0.5)
    return found


def _next(arrow: Arrow, side: str, layout: Layout) -> Place:
    """The first place that an arrow meets on its way from one of its ends."""
    passing = layout.passing[arrow]
    if passing:
        return passing[0 if side == "start" else -1]
    return layout.places[arrow.end if side == "start" else arrow.start]


def _points(arrow: Arrow, layout: Layout, ends: dict[tuple[Arrow, str], float]) -> Points:
    start, end = layout.places[arrow.start], layout.places[arrow.end]
    points = [(ends[arrow, "start"], start.y + start.height)]
    for place in layout.passing[arrow]:
        points += [(place.x, place.y), (place.x, place.y + place.height)]
    return [*points, (ends[arrow, "end"], end.y - 7)]


def _label(arrow: Arrow, points: Points, thickness: float, room: Room) -> str:
    """A label with the tensor's shape, beside its arrow or on it, where it hides least."""
    width = LETTER * len(arrow.shape) + 8
    beside = (width + thickness) / 2 + 1
    places = [
        (x + aside, y)
        for aside in (beside, -beside, 0.0)
        for a, b in pairwise(points)
        for x, y in (_along(a, b, part) for part in (0.5, 0.36, 0.64, 0.25, 0.75))
        if b[1] - a[1] > LINE
    ]
    x, y = min(places, key=lambda place: room.hidden(_frame(place[0], place[1], width, LINE)))
    room.labels.append(_frame(x, y, width, LINE))
    return (
        f'<g class="shape {arrow.kind}"><rect x="{x - width / 2:.1f}" y="{y - LINE / 2:.1f}" width="{width:.1f}" '
        f'height="{LINE:g}" rx="3"/><text x="{x:.1f}" y="{y + 3.6:.1f}">{escape(arrow.shape)}</text></g>'
    )


def _samples(points: Points, thickness: float) -> list[Frame]:
    """Small frames along an arrow."""
    parts = [step / 12 for step in range(13)]
    middles = [_along(a, b, part) for a, b in pairwise(points) for part in parts]
    return [_frame(x, y, thickness + 2, 4) for x, y in middles]


def _along(a: tuple[float, float], b: tuple[float, float], part: float) -> tuple[float, float]:
    """A point on the curve between two points that leaves and arrives vertically."""
    blend = part * part * (3 - 2 * part)
    down = 3 * (1 - part) ** 2 * part * 0.5 + 3 * (1 - part) * part**2 * 0.5 + part**3
    return a[0] + (b[0] - a[0]) * blend, a[1] + (b[1] - a[1]) * down


def _frame(x: float, y: float, width: float, height: float) -> Frame:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(a: Frame, b: Frame) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _thickness(arrow: Arrow, largest: int) -> float:
    if arrow.kind in ("weight", "output"):
        return THINNEST
    return THINNEST + (THICKEST - THINNEST) * math.sqrt(min(1.0, arrow.bytes / max(largest, 1)))
