"""`@pytest.mark.diagonal`: of all combinations of a test's parameters a few by default, and every one as `slow`.

The few are a diagonal: as many as the longest parameter has values, each of which is once among them. The others count
through their combinations as an odometer does, so that each of their values is met early, and with every other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest


def mark_others_slow(items: list[pytest.Item]) -> None:
    """Mark what is not on the diagonal of its test."""
    tests = defaultdict[object, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("diagonal") is not None:
            tests[item.parent, item.originalname].append(item)
    for combinations in tests.values():
        # A name for each `parametrize`. What pytest calls the indices of a combination is not their values'.
        names = [item.callspec._idlist for item in combinations]
        values = [list(dict.fromkeys(column)) for column in zip(*names, strict=True)]
        chosen = diagonal([len(column) for column in values])
        for item, name in zip(combinations, names, strict=True):
            if tuple(map(list.index, values, name)) not in chosen:
                item.add_marker(pytest.mark.slow)


def diagonal(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """The points of the diagonal through a grid of these sizes."""
    longest = max(range(len(sizes)), key=lambda axis: sizes[axis])
    points = set()
    for start in range(sizes[longest]):
        rest, point = start, []
        for axis, size in enumerate(sizes):
            if axis == longest:
                point.append(start)
            else:
                rest, at = divmod(rest, size)
                point.append(at)
        points.add(tuple(point))
    return points
