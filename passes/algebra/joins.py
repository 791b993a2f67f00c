"""Tensors laid one behind the other, and what their elements are: pieces, one tensor again, or a product with a stack.

Pure Python, like `operations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from .operations import MOST_TERMS, align, leaf, read_of
from .sizes import Size, same, total
from .substitution import change_read, change_term, prune
from .terms import Axis, Digit, Form, Join, Product, Read, Segment, Stacked, Term, Unread, Zero


def join(source: Hashable, pieces: Sequence[Form], dim: int) -> Form:
    """Pieces laid one behind the other along `dim` in the tensor `source`.

    Where every piece is a plain read over the same axes the result is a plain read of `source`: a cache that grew is
    one tensor. The pieces are `parts` where they tell more than that, else what it is `joined` of.
    """
    pieces = [piece for piece in pieces if not same(piece.shape[dim], 0)] or pieces[:1]
    if len(pieces) == 1:
        return pieces[0]
    rank = len(pieces[0].dims)
    aligned, _ = align(pieces, [[(k, i) if i == dim else i for i in range(rank)] for k in range(len(pieces))])
    if (whole := _every_index(aligned, dim)) is not None:
        return whole
    along = Axis(total(piece.shape[dim] for piece in aligned))
    dims = tuple((along,) if i == dim else axes for i, axes in enumerate(aligned[0].dims))
    segments = tuple(Segment(p.dims[dim], prune(p.term, 2)) for p in aligned)
    depends = [s.term.axes - set(s.axes) for s in segments]
    together = frozenset[Axis]().union(*depends)
    term = read_of(source, dims, together | {along})
    if all(s.term.parts is None for s in segments) and all(axes == together for axes in depends):
        plain = tuple(replace(s, term=replace(s.term, joined=None)) for s in segments)
        return Form(dims, replace(term, joined=Join(along, plain) if len(plain) <= MOST_TERMS else None))
    return Form(dims, replace(term, parts=_stacked(along, segments) or Join(along, segments)))


def _every_index(pieces: Sequence[Form], dim: int) -> Form | None:
    """What the pieces are read from, if they are its elements at every index of one axis, in order: that axis comes
    before their own along the join. None if they are not.

    This is how ranks come whose tensors were gathered one behind the other in another dimension.
    """
    first, *others = pieces
    if first.term.parts is not None or any(piece.term.parts is not None for piece in others):
        return None
    reads = [first.term.read]
    for piece in others:
        own = dict(zip(piece.dims[dim], first.dims[dim], strict=False))
        if len(piece.dims[dim]) != len(first.dims[dim]) or any(not same(a.size, b.size) for a, b in own.items()):
            return None
        reads.append(change_read(piece.term.read, own))
    axis = Axis(len(pieces))
    for i, digits in enumerate(first.term.read.dims):
        for j, digit in enumerate(digits):
            if digit.axis is None and same(digit.extent, len(pieces)):
                there = [_with_digit(reads[0], i, j, replace(digit, start=k)) for k in range(len(pieces))]
                if reads == there:
                    whole = _with_digit(reads[0], i, j, replace(digit, axis=axis, start=0))
                    dims = tuple((axis, *own) if k == dim else own for k, own in enumerate(first.dims))
                    return Form(dims, Term(whole))
    return None


def _with_digit(read: Read, dim: int, place: int, digit: Digit) -> Read:
    digits = read.dims[dim]
    changed = (*digits[:place], digit, *digits[place + 1 :])
    return replace(read, dims=(*read.dims[:dim], changed, *read.dims[dim + 1 :]))


def _stacked(along: Axis, segments: Sequence[Segment]) -> Product | None:
    """Products of one term with a matrix each, stacked: its product with the stack of matrices. None if they are not.

    This is how heads come that have a projection each.
    """
    products = [s.term.parts for s in segments if isinstance(s.term.parts, Product) and not s.axes]
    first = products[0] if len(products) == len(segments) else None
    if first is None or any(p.scale != first.scale or len(p.summed) != len(first.summed) for p in products):
        return None
    alike = [
        {axis: own for axis, own in zip(p.summed, first.summed, strict=True) if same(axis.size, own.size)}
        for p in products
    ]
    sides = [(change_term(p.left, own), change_term(p.right, own)) for p, own in zip(products, alike, strict=True)]
    for shared in (0, 1):
        (term, *others), matrices = [s[shared] for s in sides], [s[1 - shared].read for s in sides]
        over = matrices[0].axes
        held = not any(isinstance(read.source, Unread) for read in matrices)
        if held and all(o.read == term.read for o in others) and all(read.axes == over for read in matrices):
            order = tuple(over)
            own = tuple(Axis(axis.size) for axis in order)
            source = Stacked(tuple(change_read(read, dict(zip(order, own, strict=True))) for read in matrices), own)
            stack = read_of(source, [(along,), *((axis,) for axis in order)])
            left, right = (term, stack) if shared == 0 else (stack, term)
            return Product(left, right, first.summed, first.scale)
    return None


def pad(source: Hashable, form: Form, dim: int, before: Size, after: Size) -> Form:
    """Zeros before and after the indices of one dimension, in the tensor `source`."""
    pieces = []
    for size in (before, after):
        zeros = leaf(Unread(source), (*form.shape[:dim], size, *form.shape[dim + 1 :]))
        pieces.append(replace(zeros, term=replace(zeros.term, parts=Zero())))
    return join(source, [pieces[0], form, pieces[1]], dim)
