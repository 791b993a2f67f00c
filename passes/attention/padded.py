"""Strip the zeros with which values were padded to the width of the keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..algebra import operations
from ..algebra.sizes import Size, same, total
from ..algebra.terms import Axis, Dim, Form, Join, Term, Zero


@dataclass(frozen=True)
class Padding:
    """How many columns of zeros stand `before` and `after` the values' own; the output has all of `columns`."""

    columns: Dim
    before: Size
    after: Size


def without_zeros(value: Term, columns: Dim) -> tuple[Form, Padding] | None:
    """The values without the zeros before and after them, and that padding; None if there is none."""
    if len(columns) != 1:
        return None
    (column,) = columns
    before, after = _zeros(value, column)
    if same(before, 0) and same(after, 0):
        return None
    size = total([column.size, -1 * before, -1 * after])
    return operations.take(Form((columns,), value), 0, before, size), Padding(columns, before, after)


def _zeros(value: Term, column: Axis) -> tuple[Size, Size]:
    """How many of the first and how many of the last columns are zeros in every piece of the values."""
    join = value.parts
    if not isinstance(join, Join):
        return 0, 0
    if join.axis is not column:
        first, *others = (_zeros(segment.term, column) for segment in join.segments)
        alike = all(same(a, b) for zeros in others for a, b in zip(first, zeros, strict=True))
        return first if alike else (0, 0)
    kept = [i for i, segment in enumerate(join.segments) if not isinstance(segment.term.parts, Zero)]
    if not kept:
        return 0, 0
    sizes = [segment.size for segment in join.segments]
    return total(sizes[: kept[0]]), total(sizes[kept[-1] + 1 :])
