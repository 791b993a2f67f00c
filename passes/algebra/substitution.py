"""Changes of axes: what becomes of a term when an axis is split, sliced, pinned or renamed.

Pure Python. Each function raises `Unaligned` if a change cannot be expressed; a refinement that cannot express it is
forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .sizes import Size, Unaligned, known_at_most, product, quotient, same, total
from .terms import (
    Axis,
    Digit,
    Dim,
    Flat,
    Form,
    Join,
    Lookup,
    Lost,
    Numbers,
    Product,
    Read,
    Segment,
    Sum,
    Term,
    Undefined,
    Unread,
    Zero,
)


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


def _change_digit(digit: Digit, change: Change, faster: Sequence[Digit] | None) -> tuple[Digit, ...]:
    """The digits that a change makes of one; `faster` are those after it, None unless it is the slowest of its
    dimension."""
    match change:
        case Axis():
            return (Digit(change, digit.extent, digit.start, digit.step, digit.before, digit.after),)
        case Pin(index):
            return (replace(digit, axis=None, start=digit.start + digit.step * index, step=1),)
        case Slice(axis, start, step):
            return (replace(digit, axis=axis, start=digit.start + digit.step * start, step=digit.step * step),)
        case Split(slow, fast):
            start, extent = quotient(digit.start, fast.size), quotient(digit.extent, fast.size)
            if digit.step == 1 and start is not None and extent is not None:
                return (replace(digit, axis=slow, extent=extent, start=start), Digit(fast, fast.size))
            if digit.step != 1 or faster is None:
                raise Unaligned(f"a slice from {digit.start} of {digit.extent} does not split by {fast.size}")
            unit = product(other.extent for other in faster)
            left = total([digit.extent, -1 * digit.start, -1 * product([slow.size, fast.size])])
            before = total([digit.before, product([digit.start, unit])])
            after = total([digit.after, product([left, unit])])
            return (Digit(slow, slow.size, before=before, after=after), Digit(fast, fast.size))


def change_read(read: Read, changes: Changes) -> Read:
    def change_all(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        changed: list[Digit] = []
        for i, digit in enumerate(digits):
            change = changes.get(digit.axis) if digit.axis is not None else None
            faster = digits[1:] if i == 0 else None
            changed.extend((digit,) if change is None else _change_digit(digit, change, faster))
        return tuple(changed)

    if read.axes.isdisjoint(changes):
        return read
    return Read(read.source, tuple(change_all(dim) for dim in read.dims), read.then)


def merge(read: Read, axes: Dim, whole: Axis) -> Read:
    """A read over the axis `whole` in place of `axes`, if these follow one another in one dimension, each in full."""

    def merged(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        for i in range(len(digits) - len(axes) + 1):
            part = digits[i : i + len(axes)]
            if axes and all(digit.whole and digit.axis is axis for digit, axis in zip(part, axes, strict=True)):
                return (*digits[:i], Digit(whole, whole.size), *digits[i + len(axes) :])
        return digits

    return replace(read, dims=tuple(map(merged, read.dims)))


def change_axes(axes: Iterable[Axis], changes: Changes) -> Dim:
    """What becomes of axes."""
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
    """Apply changes to a join. A slice may leave one piece (a Term); a split has to fall on the borders of pieces."""
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
        if known_at_most(start, index) and known_at_most(index + 1, start + segment.size):
            if len(segment.axes) > 1:
                raise Unaligned("one index of a piece of several axes")
            return change_term(segment.term, {axis: Pin(index - start) for axis in segment.axes})
        start = start + segment.size
    raise Unaligned(f"index {index} is in no known piece")


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
    """The pieces that overlap with the `size` indices from `begin`, cut to the overlap."""
    end, start = begin + size, 0
    kept: list[Segment] = []
    for segment in segments:
        stop = start + segment.size
        if known_at_most(begin, start) and known_at_most(stop, end):
            kept.append(segment)
        elif not (known_at_most(stop, begin) or known_at_most(end, start)):
            kept.append(_cut(segment, start, _larger(start, begin), _smaller(stop, end)))
        start = stop
    return tuple(kept)


def _cut(segment: Segment, start: Size, low: Size, high: Size) -> Segment:
    """The part from `low` to `high` of a piece that begins at `start`."""
    if len(segment.axes) != 1 or not known_at_most(low, high):
        raise Unaligned("a slice that cuts through a joined piece")
    size = total([high, -low])
    if same(size, 1):
        return Segment((), change_term(segment.term, {segment.axes[0]: Pin(low - start)}))
    part = Axis(size)
    return Segment((part,), change_term(segment.term, {segment.axes[0]: Slice(part, low - start)}))


def _larger(a: Size, b: Size) -> Size:
    if known_at_most(a, b):
        return b
    return a if known_at_most(b, a) else _unordered(a, b)


def _smaller(a: Size, b: Size) -> Size:
    if known_at_most(a, b):
        return a
    return b if known_at_most(b, a) else _unordered(a, b)


def _unordered(a: Size, b: Size) -> Size:
    raise Unaligned(f"the order of {a} and {b} is not known")


def change_term(term: Term, changes: Changes) -> Term:
    """Apply changes of axes to a term. Parts that cannot express them are forgotten: the read still holds.

    Raises:
        Unaligned: if not even the read can express them.
    """
    read = change_read(term.read, changes)
    parts = term.parts
    try:
        match parts:
            case Product(left, right, summed, scale):
                left, right = change_term(left, changes), change_term(right, changes)
                return Term(read, Product(left, right, change_axes(summed, changes), scale))
            case Sum(terms):
                return Term(read, Sum(tuple(change_term(addend, changes) for addend in terms)))
            case Join():
                changed = _change_join(parts, changes)
                if isinstance(changed, Join):
                    return Term(read, changed)
                return replace(changed, read=read) if isinstance(changed.read.source, Unread) else changed
    except Unaligned as error:
        return Term(read, lost=Lost(str(error)))
    stored, joined = _change_stored(term.stored, changes), _still_joined(term.joined, changes)
    return Term(read, parts, stored, term.lost, joined)


def _still_joined(join: Join | None, changes: Changes) -> Join | None:
    """What a plain read is joined of after changes; None if one piece is left, or the changes cannot be expressed."""
    try:
        changed = None if join is None else _change_join(join, changes)
    except Unaligned:
        return None
    return changed if isinstance(changed, Join) else None


def _change_stored(stored: Lookup | Numbers | None, changes: Changes) -> Lookup | Numbers | None:
    """How an element is stored after changes; None (not known) if they cannot be expressed."""
    try:
        match stored:
            case Lookup(pages, _, table, _, flat, scales):
                if flat is not None:
                    flat = _change_flat(flat, changes)
                pages, table = change_read(pages, changes), change_read(table, changes)
                scales = None if scales is None else change_read(scales, changes)
                return replace(stored, pages=pages, table=table, flat=flat, scales=scales)
            case Numbers(of, by):
                by = None if by is None else change_read(by, changes)
                return replace(stored, of=change_read(of, changes), by=by)
    except Unaligned:
        pass
    return None


def _change_flat(flat: Flat, changes: Changes) -> Flat:
    match changes.get(flat.keys, flat.keys):
        case Axis() as keys:
            return replace(flat, keys=keys)
        case Slice(keys, start, 1) if same(start, 0):
            return replace(flat, keys=keys)
    raise Unaligned("keys from the middle of pages")


def change(form: Form, changes: Changes) -> Form:
    """Apply changes of axes to a form and its dimensions."""
    if not changes:
        return form
    return Form(tuple(change_axes(dim, changes) for dim in form.dims), change_term(form.term, changes))


DEPTH = 4
"""How many levels of products and joins are kept of a factor of a product and of an addend of a sum."""


def prune(term: Term, depth: int) -> Term:
    """Forget refinements that lie more than `depth` levels down, so that forms stay small in a deep graph.

    A sum is not a level: its terms are few. Nor is a buffer that is still written in part: its pieces may be one in
    the end.
    """
    match term.parts:
        case Product(left, right, summed, scale) if depth > 0:
            return Term(term.read, Product(prune(left, depth - 1), prune(right, depth - 1), summed, scale))
        case Join(axis, segments) if depth > 0:
            own = depth if any(isinstance(s.term.parts, Undefined) for s in segments) else depth - 1
            return Term(term.read, Join(axis, tuple(replace(s, term=prune(s.term, own)) for s in segments)))
        case Sum(terms) if depth > 0:
            return Term(term.read, Sum(tuple(prune(addend, depth) for addend in terms)))
        case Undefined() | Zero() | None:
            return term
    return Term(term.read, lost=Lost("products that are nested too deeply"))
