"""Reads of tensors that are not in the graph: make them from other reads, over their axes, and take them apart.

Pure Python, like `operations`. Code that reads such a tensor computes it, or works with what it is made of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from .laid import bound_axis
from .operations import read_of
from .sizes import Size, same
from .substitution import change_read
from .terms import Added, Axis, Constant, Contracted, Dim, How, Joined, Named, Read, Scaled


def multiplied(of: Read, by: Read, how: How = How.TIMES) -> Read:
    """What `by` makes of `of`, over the axes of both."""
    own = _own((of, by))
    return _read(Scaled(change_read(of, own), change_read(by, own), tuple(own.values()), how), own)


def added(pieces: Sequence[Read]) -> Read:
    """The sum of the pieces, over the axes of all of them."""
    own = _own(pieces)
    return _read(Added(tuple(change_read(piece, own) for piece in pieces), tuple(own.values())), own)


def contracted(left: Read, right: Read, summed: Dim) -> Read:
    """`sum over summed of left * right`, over the remaining axes of both."""
    own = _own((left, right))
    bound = {axis: own.pop(axis, Axis(axis.size)) for axis in summed}
    left, right = (change_read(read, own | bound) for read in (left, right))
    return _read(Contracted(left, right, tuple(bound.values()), tuple(own.values())), own)


def constant(like: Read, number: float, axes: Dim) -> Read:
    """A number over these axes, in the dtype of `like`."""
    own = {axis: bound_axis(place, axis.size) for place, axis in enumerate(axes)}
    return _read(Constant(like, number, tuple(own.values())), own)


def named(like: Read, table: Read, entry: Axis) -> Read:
    """1 where `table` names an index of `entry`, else 0, over that axis and the table's, in the dtype of `like`."""
    own = {axis: bound_axis(place, axis.size) for place, axis in enumerate((entry, *_own((table,))))}
    first = tuple(tuple(replace(digit, axis=None) for digit in digits) for digits in like.dims)
    return _read(Named(replace(like, dims=first), change_read(table, own), tuple(own.values())), own)


def padded(read: Read, own: Dim, between: tuple[Size, Size], number: float, axis: Axis) -> Read:
    """A read, whose own indices along `axis` the axes `own` count, with a number in the indices before and behind
    these.

    The axes of the source are the same in every source, so that two sources that are alike compare equal.
    """
    others = [digit.axis for digit in read.digits if digit.axis is not None and digit.axis not in own]
    names = {other: bound_axis(place, other.size) for place, other in enumerate(others)}
    beside = [() if same(size, 1) else (bound_axis(len(others), size),) for size in between]
    bound = {each: bound_axis(len(others) + place, each.size) for place, each in enumerate(own)}
    inner = change_read(read, names | bound)
    before, behind = ((constant(inner, number, (*axes, *names.values())), axes) for axes in beside)
    pieces = [before, (inner, tuple(bound.values())), behind]
    kept = [piece for piece, size in zip(pieces, (between[0], 1, between[1]), strict=True) if not same(size, 0)]
    source = Joined(tuple(piece for piece, _ in kept), tuple(axes for _, axes in kept), tuple(names.values()))
    return read_of(source, [(axis,), *((other,) for other in names)]).read


def joined(first: Read, second: Read, along: tuple[Dim, Dim], axis: Axis) -> Read | None:
    """Two reads concatenated along `axis`; `along` gives the axes that count each read's own indices there. A read that
    lacks other axes of the one beside it repeats along them, as a prompt that all sequences begin with.

    None if one repeats along an axis in its `along`. The axes of the source are the same in every source, so that two
    sources that are alike compare equal.
    """
    pieces = *side_by_side(first, along[0]), *side_by_side(second, along[1])
    digits = [(digit.axis, own) for read, own in pieces for digit in read.digits]
    others = dict.fromkeys(axis for axis, own in digits if axis is not None and axis not in own)
    whole = all({*own} <= read.axes for read, own in zip((first, second), along, strict=True))
    if not whole or others.keys() & {*along[0], *along[1]}:
        return None
    names = {own: bound_axis(place, own.size) for place, own in enumerate(others)}
    bound = [tuple(bound_axis(len(others), own.size) for own in owns) for _, owns in pieces]
    reads = [
        change_read(read, names | dict(zip(owns, own, strict=True)))
        for (read, owns), own in zip(pieces, bound, strict=True)
    ]
    source = Joined(tuple(reads), tuple(bound), tuple(names.values()))
    return read_of(source, [(axis,), *((other,) for other in names)]).read


def side_by_side(read: Read, own: Dim) -> list[tuple[Read, Dim]]:
    """The pieces of a read of all of a source that is joined along `own`, with their axes; else the read alone."""
    source = read.source
    if not isinstance(source, Joined) or read.then or any(len(d) != 1 or not d[0].whole for d in read.dims):
        return [(read, own)]
    if read.dims[0][0].axis not in own:
        return [(read, own)]
    names = {a: digits[0].axis for a, digits in zip(source.axes, read.dims[1:], strict=True) if digits[0].axis}
    fresh = [tuple(Axis(a.size) for a in along) for along in source.along]
    return [
        (change_read(piece, names | dict(zip(along, new, strict=True))), new)
        for piece, along, new in zip(source.pieces, source.along, fresh, strict=True)
    ]


def _own(reads: Sequence[Read]) -> dict[Axis, Axis]:
    """A new axis for each axis of the reads, in order: the axes of the source to be made."""
    return {d.axis: Axis(d.axis.size) for read in reads for d in read.digits if d.axis is not None}


def _read(source: Hashable, own: dict[Axis, Axis]) -> Read:
    return read_of(source, [(axis,) for axis in own]).read


def addends(read: Read) -> list[Read]:
    """The reads that a read is the sum of; the read itself if it is not a sum, or reads only part of one."""
    names = _names(read)
    if not isinstance(read.source, Added) or names is None:
        return [read]
    pieces = [change_read(piece, names) for piece in read.source.pieces]
    return [one for piece in pieces for one in addends(replace(piece, then=(*piece.then, *read.then)))]


def matrices(read: Read) -> tuple[Read, Read, Dim] | None:
    """`left, right, summed` of a read of all of a product, in the order in which it was made; None for other reads."""
    names = _names(read)
    if not isinstance(read.source, Contracted) or names is None:
        return None
    left, right = change_read(read.source.left, names), change_read(read.source.right, names)
    return left, replace(right, then=(*right.then, *read.then)), read.source.summed


def factors(read: Read) -> tuple[Read, Read, How] | None:
    """`of, by, how` of a read of all of a tensor that another one scales; None for other reads."""
    names = _names(read)
    if not isinstance(read.source, Scaled) or names is None or read.then:
        return None
    return change_read(read.source.of, names), change_read(read.source.by, names), read.source.how


def _names(read: Read) -> dict[Axis, Axis] | None:
    """For each axis of a made source, the axis of `read` in its place; None unless all of the source is read."""
    names: dict[Axis, Axis] = {}
    for digits, own in zip(read.dims, getattr(read.source, "axes", ()), strict=False):
        if len(digits) != 1 or digits[0].axis is None or not digits[0].whole:
            return None
        names[own] = digits[0].axis
    return names
