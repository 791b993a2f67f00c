"""Reads of tensors that no graph has: what is made of other reads, over their axes, and what it is made of.

Pure Python, like `operations`. Whoever reads one computes it, or multiplies with what it is made of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from .operations import read_of
from .substitution import change_read
from .terms import Added, Axis, Contracted, Dim, Read, Scaled


def multiplied(of: Read, by: Read, *, divides: bool = False) -> Read:
    """`of * by`, or `of / by`, over the axes of both."""
    own = _own((of, by))
    return _read(Scaled(change_read(of, own), change_read(by, own), tuple(own.values()), divides), own)


def added(pieces: Sequence[Read]) -> Read:
    """The sum of the pieces, over the axes of all."""
    own = _own(pieces)
    return _read(Added(tuple(change_read(piece, own) for piece in pieces), tuple(own.values())), own)


def contracted(left: Read, right: Read, summed: Dim) -> Read:
    """`sum over summed of left * right`, over the other axes of both."""
    own = _own((left, right))
    bound = {axis: own.pop(axis, Axis(axis.size)) for axis in summed}
    left, right = (change_read(read, own | bound) for read in (left, right))
    return _read(Contracted(left, right, tuple(bound.values()), tuple(own.values())), own)


def _own(reads: Sequence[Read]) -> dict[Axis, Axis]:
    """An axis of the source's own for each of the reads', in order."""
    return {d.axis: Axis(d.axis.size) for read in reads for dim in read.dims for d in dim if d.axis is not None}


def _read(source: Hashable, own: dict[Axis, Axis]) -> Read:
    return read_of(source, [(axis,) for axis in own]).read


def addends(read: Read) -> list[Read]:
    """What a read is the sum of; of one that is none, or of which only a part is read, the read itself."""
    names = _names(read)
    if not isinstance(read.source, Added) or names is None:
        return [read]
    pieces = [change_read(piece, names) for piece in read.source.pieces]
    return [one for piece in pieces for one in addends(replace(piece, then=(*piece.then, *read.then)))]


def matrices(read: Read) -> tuple[Read, Read, Dim] | None:
    """`left, right, summed` of a read that is a product of two, in the order of what it was made of."""
    names = _names(read)
    if not isinstance(read.source, Contracted) or names is None:
        return None
    left, right = change_read(read.source.left, names), change_read(read.source.right, names)
    return left, replace(right, then=(*right.then, *read.then)), read.source.summed


def _names(read: Read) -> dict[Axis, Axis] | None:
    """What the axes of a source that is made are called in a read of all of it; None if that reads it otherwise."""
    names: dict[Axis, Axis] = {}
    for digits, own in zip(read.dims, getattr(read.source, "axes", ()), strict=False):
        if len(digits) != 1 or digits[0].axis is None or not digits[0].whole:
            return None
        names[own] = digits[0].axis
    return names
