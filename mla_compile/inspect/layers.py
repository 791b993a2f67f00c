"""Lay out the boxes of a sketch: in layers from top to bottom, with few crossings, and each box near its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .sketch import Arrow, Sketch

GAP_ACROSS, GAP_DOWN, HEIGHT = 30.0, 72.0, 42.0
PASSING = 16.0
"""The width that is kept free where an arrow passes a layer."""
SWEEPS = 12
TITLE_WIDTH, DETAIL_WIDTH, PADDING, NARROWEST = 8.0, 6.3, 26.0, 96.0
"""The widths of a letter of a box's title and second line, the padding, and the least width of a box, in pixels."""


@dataclass(frozen=True)
class Place:
    """The place of a box, or of an arrow that passes a layer: the middle of its upper edge, its width and height."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """The places of boxes by key, the places that each arrow passes, and the total size."""

    places: dict[str, Place]
    passing: dict[Arrow, list[Place]]
    width: float
    height: float


def arrange(sketch: Sketch) -> Layout:
    """Lay out a sketch."""
    layer = _layers(sketch)
    rows: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    widths: dict[str, float] = {}
    for key, box in sketch.boxes.items():
        rows[layer[key]].append(key)
        widths[key] = max(NARROWEST, TITLE_WIDTH * len(box.title) + PADDING, DETAIL_WIDTH * len(box.detail) + PADDING)
    neighbours: dict[str, list[str]] = {key: [] for key in widths}
    chains: dict[Arrow, list[str]] = {}
    for number, arrow in enumerate(sketch.arrows):
        chain = [f"{number} at {row}" for row in range(layer[arrow.start] + 1, layer[arrow.end])]
        for row, key in enumerate(chain, layer[arrow.start] + 1):
            rows[row].append(key)
            widths[key], neighbours[key] = PASSING, []
        for a, b in zip([arrow.start, *chain], [*chain, arrow.end], strict=True):
            neighbours[a].append(b)
            neighbours[b].append(a)
        chains[arrow] = chain
    middles = _middles(rows, widths, neighbours)
    left = min(middles[key] - widths[key] / 2 for key in widths)
    places: dict[str, Place] = {}
    for number, members in enumerate(rows):
        for key in members:
            places[key] = Place(middles[key] - left, number * (HEIGHT + GAP_DOWN), widths[key], HEIGHT)
    return Layout(
        {key: places[key] for key in sketch.boxes},
        {arrow: [places[key] for key in chain] for arrow, chain in chains.items()},
        width=max(place.x + place.width / 2 for place in places.values()),
        height=len(rows) * (HEIGHT + GAP_DOWN) - GAP_DOWN,
    )


def _layers(sketch: Sketch) -> dict[str, int]:
    """Put each box below all boxes from which it takes tensors, and each entrance just above its first use."""
    layer = dict.fromkeys(sketch.boxes, 0)
    for _ in sketch.boxes:  # as many rounds as the longest path can have
        moved = {a.end: max(layer[a.end], layer[a.start] + 1) for a in sketch.arrows}
        settled = all(layer[a.end] > layer[a.start] for a in sketch.arrows)
        if settled:
            break
        for arrow in sketch.arrows:
            layer[arrow.end] = max(layer[arrow.end], layer[arrow.start] + 1, moved[arrow.end])
    for key, box in sketch.boxes.items():
        uses = [layer[a.end] for a in sketch.arrows if a.start == key]
        if box.entrance and uses:
            layer[key] = min(uses) - 1
    return layer


def _middles(rows: list[list[str]], widths: dict[str, float], neighbours: dict[str, list[str]]) -> dict[str, float]:
    """Sort the rows and place their members near their neighbours, in sweeps down and up."""
    middles: dict[str, float] = {}
    for row in rows:
        _spread(row, dict.fromkeys(row, 0.0), widths, middles)
    row_of = {key: number for number, row in enumerate(rows) for key in row}
    for sweep in range(SWEEPS):
        order = range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1)
        for number in order:
            wanted: dict[str, float] = {}
            for key in rows[number]:
                near = [n for n in neighbours[key] if sweep > SWEEPS // 2 or (row_of[n] < number) == (sweep % 2 == 0)]
                near = near or neighbours[key]
                wanted[key] = sum(middles[n] for n in near) / len(near) if near else middles[key]
            if sweep <= SWEEPS // 2:
                rows[number].sort(key=lambda key: wanted[key])
            _spread(rows[number], wanted, widths, middles)
    return middles


def _spread(row: list[str], wanted: dict[str, float], widths: dict[str, float], middles: dict[str, float]) -> None:
    """Place a row's members in order and without overlap, as close as possible to their wanted places."""
    blocks: list[tuple[list[str], float]] = []  # members that touch, and the middle of the first
    for key in row:
        blocks.append(([key], wanted[key]))
        while len(blocks) > 1 and _end(blocks[-2], widths) + GAP_ACROSS > blocks[-1][1] - widths[blocks[-1][0][0]] / 2:
            (left, _), (right, _) = blocks[-2], blocks[-1]
            members = left + right
            offsets = _offsets(members, widths)
            blocks[-2:] = [(members, sum(wanted[k] - o for k, o in zip(members, offsets, strict=True)) / len(members))]
    for members, first in blocks:
        middles.update({key: first + offset for key, offset in zip(members, _offsets(members, widths), strict=True)})


def _end(block: tuple[list[str], float], widths: dict[str, float]) -> float:
    members, first = block
    return first + _offsets(members, widths)[-1] + widths[members[-1]] / 2


def _offsets(members: list[str], widths: dict[str, float]) -> list[float]:
    """The distances from the middle of the first of touching members to the middle of each."""
    offsets = [0.0]
    for a, b in pairwise(members):
        offsets.append(offsets[-1] + (widths[a] + widths[b]) / 2 + GAP_ACROSS)
    return offsets
