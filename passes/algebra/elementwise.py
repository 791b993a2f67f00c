"""The forms of elementwise functions of broadcast operands, and of sums of them.

Pure Python. Both functions raise `Unaligned` when sizes do not factor over one another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from .operations import align, piece_of, read_of
from .sizes import Size, Unaligned, product, quotient, same, total
from .substitution import DEPTH, change_term, prune
from .terms import Axis, Dim, Form, Join, Lost, Segment, Sum, Term, Undefined, Zero


def pointwise(source: Hashable, operands: Sequence[Form], shape: Sequence[Size]) -> Form:
    """The form of `source`, an elementwise function of broadcast operands.

    The result is a plain read. It repeats along every axis along which all operands repeat.
    """
    known = [(operand.dims, operand.term.axes) for operand in operands]
    result, depends = list[Dim](), set[Axis]()
    for i, size in zip(range(-len(shape), 0), shape, strict=True):
        parts = _divided_alike([[(a.size, a in own) for a in dims[i]] for dims, own in known if i >= -len(dims)])
        if parts and all(differ for _, differ in parts):  # the division says nothing more, and would obstruct a view
            parts = [(product(extent for extent, _ in parts), True)]
        axes = [Axis(extent) for extent, _ in parts or ([] if same(size, 1) else [(size, False)])]
        depends.update(axis for axis, (_, differ) in zip(axes, parts, strict=False) if differ)
        result.append(tuple(axes))
    return Form(tuple(result), read_of(source, result, frozenset(depends)))


_Part = tuple[Size, bool]
"""A factor of a dimension, and whether elements differ along it."""


def _divided_alike(dims: Sequence[Sequence[_Part]]) -> list[_Part]:
    """The coarsest division of a dimension, slowest factor first, that divides it wherever one of the tensors does.

    Tensors without factors are broadcast along the dimension. Raises Unaligned if factors do not divide one another.
    """
    pending = [list(parts)[::-1] for parts in dims if parts]
    found: list[_Part] = []
    while any(pending):
        if not all(pending):
            raise Unaligned("dimensions of different sizes")
        slowest = [parts.pop() for parts in pending]
        sizes = [size for size, _ in slowest]
        common = next((size for size in sizes if all(quotient(other, size) is not None for other in sizes)), None)
        if common is None:
            raise Unaligned(f"axes of {' and '.join(map(str, sizes))} do not provably divide one another")
        found.append((common, any(differ for _, differ in slowest)))
        for parts, (size, differ) in zip(pending, slowest, strict=True):
            rest = quotient(size, common)
            if rest is not None and not same(rest, 1):
                parts.append((rest, differ))
    return found


def add(source: Hashable, operands: Sequence[Form], shape: Sequence[Size]) -> Form:
    """The form of `source`, a sum of broadcast operands, with the operands as its terms.

    If an operand is a join, the result is a join of sums. Two tensors that are padded with zeros to one width thus
    add up to a join of the two.
    """
    plain = pointwise(source, operands, shape)
    own = range(len(shape))
    aligned, axes = align([plain, *operands], [own, *(own[len(shape) - len(o.dims) :] for o in operands)])
    dims = tuple(axes[i] for i in own)
    return Form(dims, _sum(aligned[0].term, [prune(o.term, DEPTH) for o in aligned[1:]]))


def addends(terms: Iterable[Term]) -> list[Term]:
    """Terms that are added up, each that is itself a sum as its own terms."""
    return [t for term in terms for t in (term.parts.terms if isinstance(term.parts, Sum) else (term,))]


MOST_TERMS = 4
"""The most terms that a sum keeps: enough for a bias or two, too few for a residual stream."""


def _sum(whole: Term, terms: Sequence[Term]) -> Term:
    """`whole`, the sum of the terms, refined by what is known about it."""
    flat = addends(terms)
    if any(isinstance(term.parts, Undefined) for term in flat):
        return replace(whole, parts=Undefined())
    flat = [term for term in flat if not isinstance(term.parts, Zero)]
    if len(flat) == 1:
        return flat[0]
    joined = next((term.parts for term in flat if isinstance(term.parts, Join)), None)
    if joined is not None:
        start: Size = 0
        segments: list[Segment] = []
        for segment in joined.segments:
            axes = tuple(Axis(axis.size) for axis in segment.axes)  # new ones: two operands may be joins over the same
            own, *others = (
                # the piece's own read says more precisely along which axes it repeats
                change_term(segment.term, dict(zip(segment.axes, axes, strict=True)))
                if term.parts is joined
                else piece_of(term, joined.axis, start, axes)
                for term in (whole, *flat)
            )
            segments.append(Segment(axes, _sum(own, others)))
            start = total([start, segment.size])
        return replace(whole, parts=Join(joined.axis, tuple(segments)))
    if len(flat) > MOST_TERMS:
        return replace(whole, lost=Lost(f"a sum of more than {MOST_TERMS} terms, which is taken as a whole"))
    return replace(whole, parts=Sum(tuple(flat)) if flat else Zero())
