"""`@pytest.mark.diagonal`: run only a few combinations of a test's parameters by default, and mark the others `slow`.

The few are a diagonal: as many as the longest parameter has values, each of which occurs once. The other parameters
count through their combinations like an odometer, so that each of their values occurs early, and with all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest


def mark_others_slow(items: list[pytest.Item]) -> None:
    """Mark as slow the combinations that are not on the diagonal of their test."""
    tests = defaultdict[object, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("diagonal") is not None:
            tests[item.parent, item.originalname].append(item)
    for combinations in tests.values():
        # One name per `parametrize`. pytest's own indices of a combination are not those of its values.
        names = [item.callspec._idlist for item in combinations]
        values = [list(dict.fromkeys(column)) for column in zip(*names, strict=True)]
        chosen = diagonal([len(column) for column in values])
        for item, name in zip(combinations, names, strict=True):
            if tuple(map(list.index, values, name)) not in chosen:
                item.add_marker(pytest.mark.slow)


def diagonal(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """The points on the diagonal of a grid of these sizes."""
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
