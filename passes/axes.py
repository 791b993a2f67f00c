"""The axis algebra: what a tensor's elements are, whatever views and copies stand between.

A tensor is described by a `Form`: every dimension is an ordered product of atomic axes (slowest first, so a merged
dimension `[B*T]` is the two axes `B, T`), and a `Term` says what the element at these axes is:

- a `Read` of a source tensor, each dimension of which is a product of digits: `start + step * axis`, or pinned;
- refined, where that is known, to a `Product` (a contraction of two terms) or a `Join` (pieces along one axis).

Layout operations only rename, split, restrict or reorder axes, so two spellings of one computation get equal terms.
An axis that no term mentions is a broadcast. Axes of size 1 do not exist: their index is always 0.

Pure Python: no torch, no graphs. Sizes are ints or sympy expressions over integer symbols.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr


class Unaligned(Exception):
    """Sizes do not factor over one another, so that the axes cannot be told apart."""


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` where `b` divides `a` for every value of their symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b != 0 and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = sympy.fraction(ratio)
    if denominator != 1 or not ratio.is_integer:
        return None
    return int(numerator) if numerator.is_Integer else numerator


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 for none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total if isinstance(total, int) else sympy.expand(total)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of sizes."""
    result: Size = 0
    for size in sizes:
        result = result + size
    if isinstance(result, int):
        return result
    result = sympy.expand(result)
    return int(result) if result.is_Integer else result


@dataclass(frozen=True, eq=False)
class Axis:
    """One atomic index running over `size` values. Two axes are the same only if they are one object."""

    size: Size

    def __repr__(self) -> str:
        return f"Axis({self.size})@{id(self) & 0xFFFF:04x}"


Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Digit:
    """One factor of a source dimension, of `extent` values: `start + step * axis`, or `start` where `axis` is None."""

    axis: Axis | None
    extent: Size
    start: Size = 0
    step: int = 1

    @property
    def whole(self) -> bool:
        """Whether the axis runs over all of the digit's values in order."""
        return self.axis is not None and self.step == 1 and same(self.start, 0) and same(self.axis.size, self.extent)


@dataclass(frozen=True)
class Read:
    """Elements of `source`; `dims[i]` are the digits of its dimension i, slowest first.

    `then` is what was done to them after, in order: multiplied by a float, or cast to what is none.
    """

    source: Hashable
    dims: tuple[tuple[Digit, ...], ...]
    then: tuple[Hashable, ...] = ()

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(digit.axis for dim in self.dims for digit in dim if digit.axis is not None)


@dataclass(frozen=True)
class Product:
    """`scale * sum over summed of left * right`."""

    left: Term
    right: Term
    summed: Dim
    scale: float = 1.0


@dataclass(frozen=True)
class Segment:
    """A piece of a `Join`: `term`, whose own axes along the join are `axes`, slowest first."""

    axes: Dim
    term: Term

    @property
    def size(self) -> Size:
        return product(axis.size for axis in self.axes)


@dataclass(frozen=True)
class Join:
    """Pieces laid one behind the other along `axis`."""

    axis: Axis
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Undefined:
    """Memory that nobody has written."""


@dataclass(frozen=True)
class Term:
    """An element: how to read it from a tensor that exists, and, if known, what it is made of."""

    read: Read
    parts: Product | Join | Undefined | None = None

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that the element depends on. A dimension's other axes are broadcast."""
        match self.parts:
            case Product(left, right, summed):
                return (left.axes | right.axes) - frozenset(summed)
            case Join(axis, segments):
                inner = frozenset[Axis]().union(*(s.term.axes - set(s.axes) for s in segments))
                return inner | {axis}
            case Undefined():
                return frozenset()
        return self.read.axes


@dataclass(frozen=True)
class Form:
    """A tensor: `dims[i]` are the axes of dimension i, slowest first; `term` the element at them."""

    dims: tuple[Dim, ...]
    term: Term

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(product(axis.size for axis in dim) for dim in self.dims)


# Substitutions: what becomes of an axis.


@dataclass(frozen=True)
class Split:
    """The axis is `slow * fast.size + fast`."""

    slow: Axis
    fast: Axis


@dataclass(frozen=True)
class Slice:
    """The axis is `start + step * axis`."""

    axis: Axis
    start: Size
    step: int = 1


@dataclass(frozen=True)
class Pin:
    """The axis is the constant `index`."""

    index: Size


Change = Split | Slice | Pin | Axis
Changes = Mapping[Axis, Change]


def _change_digit(digit: Digit, change: Change) -> tuple[Digit, ...]:
    match change:
        case Axis():
            return (replace(digit, axis=change),)
        case Pin(index):
            return (Digit(None, digit.extent, digit.start + digit.step * index),)
        case Slice(axis, start, step):
            return (Digit(axis, digit.extent, digit.start + digit.step * start, digit.step * step),)
        case Split(slow, fast):
            slow_start = quotient(digit.start, fast.size)
            slow_extent = quotient(digit.extent, fast.size)
            if digit.step != 1 or slow_start is None or slow_extent is None:
                raise Unaligned(f"a slice from {digit.start} of {digit.extent} does not split by {fast.size}")
            return (Digit(slow, slow_extent, slow_start), Digit(fast, fast.size))


def change_read(read: Read, changes: Changes) -> Read:
    def change_all(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        changed: list[Digit] = []
        for digit in digits:
            change = changes.get(digit.axis) if digit.axis is not None else None
            changed.extend((digit,) if change is None else _change_digit(digit, change))
        return tuple(changed)

    if read.axes.isdisjoint(changes):
        return read
    return replace(read, dims=tuple(change_all(dim) for dim in read.dims))


def _change_axes(axes: Iterable[Axis], changes: Changes) -> Dim:
    changed: list[Axis] = []
    for axis in axes:
        match changes.get(axis, axis):
            case Axis() as other:
                changed.append(other)
            case Slice(other, _, _):
                changed.append(other)
            case Split(slow, fast):
                changed += [slow, fast]
            case Pin():
                pass
    return tuple(changed)


def _change_join(join: Join, changes: Changes) -> Term | Join:
    """Apply changes to a join: a slice may leave one piece (a Term), a split has to fall on the pieces' borders."""
    own = changes.get(join.axis)
    rest = {axis: change for axis, change in changes.items() if axis is not join.axis}
    segments = tuple(replace(s, term=change_term(s.term, rest)) for s in join.segments) if rest else join.segments
    match own:
        case None:
            return Join(join.axis, segments)
        case Axis():
            return Join(own, segments)
        case Split(slow, fast):
            return Join(slow, tuple(_split_segment(segment, fast) for segment in segments))
        case Pin(index):
            return _pin_join(segments, index)
        case Slice(axis, begin, step):
            return _slice_join(segments, axis, begin, step)


def _split_segment(segment: Segment, fast: Axis) -> Segment:
    if len(segment.axes) > 1 and same(segment.axes[-1].size, fast.size):
        return Segment(segment.axes[:-1], change_term(segment.term, {segment.axes[-1]: fast}))
    count = quotient(segment.size, fast.size)
    if count is None or len(segment.axes) != 1:
        raise Unaligned(f"a piece of {segment.size} does not split by {fast.size}")
    if same(count, 1):
        return Segment((), change_term(segment.term, {segment.axes[0]: fast}))
    axis = Axis(count)
    return Segment((axis,), change_term(segment.term, {segment.axes[0]: Split(axis, fast)}))


def _pin_join(segments: Sequence[Segment], index: Size) -> Term:
    start: Size = 0
    for segment in segments:
        if _known_at_most(start, index) and _known_at_most(index + 1, start + segment.size):
            if len(segment.axes) > 1:
                raise Unaligned("one index of a piece of several axes")
            return change_term(segment.term, {axis: Pin(index - start) for axis in segment.axes})
        start = start + segment.size
    raise Unaligned(f"index {index} is in no known piece")


def _known_at_most(a: Size, b: Size) -> bool:
    difference = sympy.expand(sympy.sympify(b) - sympy.sympify(a))
    return bool(difference.is_nonnegative)


def _slice_join(segments: Sequence[Segment], axis: Axis, begin: Size, step: int) -> Term | Join:
    if step != 1:
        raise Unaligned("a strided slice over joined pieces")
    kept = overlapping(segments, begin, axis.size)
    if len(kept) > 1:
        return Join(axis, kept)
    if len(kept) != 1 or len(kept[0].axes) != 1:
        raise Unaligned("a slice of a piece of several axes")
    return change_term(kept[0].term, {kept[0].axes[0]: axis})


def overlapping(segments: Sequence[Segment], begin: Size, size: Size) -> tuple[Segment, ...]:
    """The pieces that `size` indices from `begin` reach, cut to what they reach of them."""
    end, start = begin + size, 0
    kept: list[Segment] = []
    for segment in segments:
        stop = start + segment.size
        if _known_at_most(begin, start) and _known_at_most(stop, end):
            kept.append(segment)
        elif not (_known_at_most(stop, begin) or _known_at_most(end, start)):
            kept.append(_cut(segment, start, _larger(start, begin), _smaller(stop, end)))
        start = stop
    return tuple(kept)


def _cut(segment: Segment, start: Size, low: Size, high: Size) -> Segment:
    """The part from `low` to `high` of a piece that begins at `start`."""
    if len(segment.axes) != 1 or not _known_at_most(low, high):
        raise Unaligned("a slice that cuts through a joined piece")
    size = total([high, -low])
    if same(size, 1):
        return Segment((), change_term(segment.term, {segment.axes[0]: Pin(low - start)}))
    part = Axis(size)
    return Segment((part,), change_term(segment.term, {segment.axes[0]: Slice(part, low - start)}))


def _larger(a: Size, b: Size) -> Size:
    if _known_at_most(a, b):
        return b
    return a if _known_at_most(b, a) else _unordered(a, b)


def _smaller(a: Size, b: Size) -> Size:
    if _known_at_most(a, b):
        return a
    return b if _known_at_most(b, a) else _unordered(a, b)


def _unordered(a: Size, b: Size) -> Size:
    raise Unaligned(f"the order of {a} and {b} is not known")


def change_term(term: Term, changes: Changes) -> Term:
    """Apply changes of axes to a term. Parts that do not follow are forgotten: the read still holds.

    Raises:
        Unaligned: if not even the read can express them.
    """
    read = change_read(term.read, changes)
    parts = term.parts
    try:
        match parts:
            case Product(left, right, summed, scale):
                left, right = change_term(left, changes), change_term(right, changes)
                return Term(read, Product(left, right, _change_axes(summed, changes), scale))
            case Join():
                changed = _change_join(parts, changes)
                return replace(changed, read=read) if isinstance(changed, Term) else Term(read, changed)
    except Unaligned:
        return Term(read)
    return Term(read, parts)


def change(form: Form, changes: Changes) -> Form:
    """Apply changes of axes to a form and its dimensions."""
    if not changes:
        return form
    return Form(tuple(_change_axes(dim, changes) for dim in form.dims), change_term(form.term, changes))


def prune(term: Term, depth: int) -> Term:
    """Forget what lies more than `depth` refinements down, so that forms stay small in a deep graph."""
    match term.parts:
        case Product(left, right, summed, scale) if depth > 0:
            return Term(term.read, Product(prune(left, depth - 1), prune(right, depth - 1), summed, scale))
        case Join(axis, segments) if depth > 0:
            return Term(term.read, Join(axis, tuple(replace(s, term=prune(s.term, depth - 1)) for s in segments)))
        case Undefined():
            return term
    return Term(term.read)
