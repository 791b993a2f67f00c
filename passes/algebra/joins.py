"""Concatenate tensors. The elements of the result are pieces, one tensor again, or a product with a stack.

Pure Python, like `operations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from .elementwise import MOST_TERMS
from .operations import align, leaf, read_of
from .runs import as_one
from .sizes import Size, same, total
from .substitution import DEPTH, change_read, change_term, prune
from .terms import Axis, Form, Join, Product, Read, Segment, Stacked, Sum, Term, Unread, Zero


def join(source: Hashable, pieces: Sequence[Form], dim: int) -> Form:
    """Concatenate `pieces` along `dim`, into the tensor `source`.

    Consecutive parts of one tensor or product become one piece again (see `runs`). If every piece is a plain read
    over the same axes, the result is a plain read of `source`: a cache that grew is one tensor. It is then `joined`
    of the pieces, if they are few. Pieces that say more than that become its `parts`.
    """
    pieces = [part for piece in pieces for part in _opened(piece, dim)]
    pieces = [piece for piece in pieces if not same(piece.shape[dim], 0)] or pieces[:1]
    if len(pieces) == 1:
        return pieces[0]
    rank = len(pieces[0].dims)
    aligned, _ = align(pieces, [[(k, i) if i == dim else i for i in range(rank)] for k in range(len(pieces))])
    if (whole := _in_one_run(source, aligned, dim)) is not None:
        return whole
    if (whole := _in_one_product(source, aligned, dim)) is not None:
        return whole
    along = Axis(total(piece.shape[dim] for piece in aligned))
    dims = tuple((along,) if i == dim else axes for i, axes in enumerate(aligned[0].dims))
    # A product that is a piece keeps as much of its factors as one by itself: scores of joined keys need it.
    segments = tuple(Segment(p.dims[dim], prune(p.term, DEPTH + 1)) for p in aligned)
    depends = [s.term.axes - set(s.axes) for s in segments]
    together = frozenset[Axis]().union(*depends)
    term = read_of(source, dims, together | {along})
    if all(s.term.parts is None for s in segments) and all(axes == together for axes in depends):
        plain = tuple(replace(s, term=replace(s.term, joined=None)) for s in segments)
        return Form(dims, replace(term, joined=Join(along, plain) if len(plain) <= MOST_TERMS else None))
    joined = replace(term, parts=Join(along, segments))
    one = stacked(joined)
    return Form(dims, one if one is not joined else replace(term, parts=Join(along, _in_runs(source, segments))))


def _opened(piece: Form, dim: int) -> Sequence[Form]:
    """The pieces of `piece`, if it is itself a join along the same dimension; else `piece` alone."""
    parts = piece.term.parts
    if not isinstance(parts, Join) or piece.dims[dim] != (parts.axis,):
        return (piece,)
    return [Form((*piece.dims[:dim], s.axes, *piece.dims[dim + 1 :]), s.term) for s in parts.segments]


def _in_one_run(source: Hashable, pieces: Sequence[Form], dim: int) -> Form | None:
    """The pieces as one run; None if they are not one.

    The axis that counts the pieces may come before the axes of each piece, as when ranks are gathered one behind
    another. Runs may themselves be pieces of a longer run, as in a loop over heads whose groups have a latent each.
    """
    runs = list(pieces)
    while len(runs) > 1:
        longer = runs[:1]
        for run in runs[1:]:
            one = as_one(source, longer[-1], run, dim)
            longer[-1:] = [longer[-1], run] if one is None else [one]
        if len(longer) == len(runs):
            return None
        runs = longer
    (whole,) = runs
    unread = isinstance(whole.term.read.source, Unread)
    read = read_of(source, whole.dims, whole.term.axes).read if unread else whole.term.read
    return replace(whole, term=replace(whole.term, read=read))


def _in_one_product(source: Hashable, pieces: Sequence[Form], dim: int) -> Form | None:
    """Products with one common factor, as its product with the other factors joined; None if there is no such factor.

    cat(latent_0 @ w, latent_1 @ w)   =   cat(latent_0, latent_1) @ w
    """
    if any(piece.term.parts is None for piece in pieces):
        return None
    first, *rest = pieces
    run: Form | None = first
    for piece in rest:
        run = None if run is None else as_one(source, run, piece, dim, joins=True)
    if run is None or not isinstance(run.term.read.source, Unread):
        return None
    return replace(run, term=replace(run.term, read=read_of(source, run.dims, run.term.axes).read))


def _in_runs(source: Hashable, segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments, with neighbours merged if they are one run over one axis: all that was written to a buffer so far,
    perhaps."""
    runs = [segments[0]]
    for segment in segments[1:]:
        last, own = (Form((part.axes,), part.term) for part in (runs[-1], segment))
        run = as_one(source, last, own, 0)
        if run is not None and len(run.dims[0]) == 1:
            runs[-1] = Segment(run.dims[0], run.term)
        else:
            runs.append(segment)
    return tuple(runs)


def stacked(term: Term, *, nested: bool = False) -> Term:
    """An element that is one of several, stacked, as their product with stacked matrices if they are that; else as it
    is.

    Heads that have a projection each, perhaps with a bias, look like this. If `nested`, what each head projects may
    itself be such a product, with a matrix of this head.
    """
    join = term.parts
    if not isinstance(join, Join) or any(segment.axes for segment in join.segments):
        return term
    parts = _Stack(term.read.source, join.axis, nested).parts([segment.term for segment in join.segments])
    return term if parts is None else replace(term, parts=parts)


@dataclass(frozen=True)
class _Stack:
    """Stacks terms of the tensor `source`, one for each index of `along`."""

    source: Hashable
    along: Axis
    nested: bool

    def parts(self, terms: Sequence[Term]) -> Product | Sum | None:
        """Products of one term with a matrix each, as its product with the stacked matrices, or sums of such products
        and biases; None if they are neither."""
        sums = [term.parts.terms for term in terms if isinstance(term.parts, Sum)]
        if len(sums) == len(terms) and all(len(addends) == len(sums[0]) for addends in sums):
            each = [self._addend(addends) for addends in zip(*sums, strict=True)]
            known = tuple(addend for addend in each if addend is not None)
            return Sum(known) if len(known) == len(each) else None
        products = [term.parts for term in terms if isinstance(term.parts, Product)]
        first = products[0] if len(products) == len(terms) else None
        if first is None or any(p.scale != first.scale or len(p.summed) != len(first.summed) for p in products):
            return None
        alike = [
            {axis: own for axis, own in zip(p.summed, first.summed, strict=True) if same(axis.size, own.size)}
            for p in products
        ]
        sides = [(change_term(p.left, own), change_term(p.right, own)) for p, own in zip(products, alike, strict=True)]
        for shared in (0, 1):
            matrices = self._matrices([s[1 - shared].read for s in sides])
            term = self._one([s[shared] for s in sides]) if matrices is not None else None
            if matrices is not None and term is not None:
                left, right = (term, matrices) if shared == 0 else (matrices, term)
                return Product(left, right, first.summed, first.scale)
        return None

    def _one(self, terms: Sequence[Term]) -> Term | None:
        """The term that all of these are; or what they are together, if they are `nested`."""
        first, *others = terms
        if all(other.read == first.read for other in others):
            return first
        parts = self.parts(terms) if self.nested else None
        return None if parts is None else _unread(self.source, parts)

    def _addend(self, terms: Sequence[Term]) -> Term | None:
        if all(term.parts is None and len(term.axes) <= 1 for term in terms):  # biases
            first, *others = terms
            return first if all(o.read == first.read for o in others) else self._matrices([t.read for t in terms])
        parts = self.parts(terms)
        return None if parts is None else _unread(self.source, parts)

    def _matrices(self, reads: Sequence[Read]) -> Term | None:
        """Reads over the same axes, stacked; None if the graph does not hold what is read, or their axes differ."""
        order = tuple(dict.fromkeys(digit.axis for digit in reads[0].digits if digit.axis is not None))
        if any(isinstance(read.source, Unread) or read.axes != reads[0].axes for read in reads):
            return None
        own = tuple(Axis(axis.size) for axis in order)
        source = Stacked(tuple(change_read(read, dict(zip(order, own, strict=True))) for read in reads), own)
        return read_of(source, [(self.along,), *((axis,) for axis in order)])


def _unread(source: Hashable, parts: Product | Sum) -> Term:
    read = read_of(Unread(source), [(axis,) for axis in Term(read_of(None, ()).read, parts).axes]).read
    return Term(read, parts)


def pad(source: Hashable, form: Form, dim: int, before: Size, after: Size) -> Form:
    """Pad one dimension with zeros before and after its indices; the result is the tensor `source`."""
    pieces = []
    for size in (before, after):
        zeros = leaf(Unread(source), (*form.shape[:dim], size, *form.shape[dim + 1 :]))
        pieces.append(replace(zeros, term=replace(zeros.term, parts=Zero())))
    return join(source, [pieces[0], form, pieces[1]], dim)
