"""How the keys of sequences are shared out, as `kernels/_common/pieces.py` says it, in plain Python: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from mla_compile.kernels._common.launch import LEAST_TILES

Segment = tuple[int, int, int]
"""A sequence, and its first tile of keys and one more than the last that a program takes."""


def line(tiles: Sequence[int], parts: int, own: int) -> tuple[int, list[int]]:
    """What a piece takes, and where each sequence begins, and the next one would."""
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
    """What each program takes: sequences without keys too."""
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
    """How long the program takes that takes longest, in tiles of keys."""
    return max(sum(end - begin + own for _, begin, end in piece) for piece in pieces(tiles, parts, own))
