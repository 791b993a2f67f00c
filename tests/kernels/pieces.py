"""Share out the keys of sequences over programs, as `kernels/_common/pieces.py` describes it, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from mla_compile.kernels._common.launch import LEAST_TILES

Segment = tuple[int, int, int]
"""A sequence, the first of its tiles of keys that a program takes, and one more than the last."""


def line(tiles: Sequence[int], parts: int, own: int) -> tuple[int, list[int]]:
    """The size of a piece, and the places on the line where each sequence begins and where the last one ends."""
    payload = max(-(-(sum(tiles) + own * len(tiles)) // parts), LEAST_TILES)
    rooms = list(tiles)
    if len(tiles) <= parts and max(tiles) <= payload:
        rooms = [max(tiles)] * len(tiles)
        payload = max(tiles) + own
    places = [0]
    for room in rooms:
        places.append(places[-1] + room + own)
    return payload, places


def pieces(tiles: Sequence[int], parts: int, own: int) -> list[list[Segment]]:
    """The segments that each program takes; sequences without keys have one too."""
    payload, places = line(tiles, parts, own)
    found = []
    for first in range(0, parts * payload, payload):
        ends = [min(first + payload - place, count) for place, count in zip(places, tiles, strict=False)]
        found.append(
            [
                (b, max(first - place, 0), end)
                for b, (place, end) in enumerate(zip(places, ends, strict=False))
                if first <= place < first + payload or max(first - place, 0) < end
            ]
        )
    return found


def makespan(tiles: Sequence[int], parts: int, own: int) -> int:
    """The time of the slowest program, in tiles of keys."""
    return max(sum(end - begin + own for _, begin, end in piece) for piece in pieces(tiles, parts, own))
