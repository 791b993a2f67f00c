"""Turn a join of products into one product, if the factors on one side are consecutive parts of a single tensor.

    cat(w[0] @ v_0, w[1] @ v_1)      =      w @ stack(v_0, v_1)

Pure Python, like `joins`.
"""

from __future__ import annotations

from dataclasses import replace

from .operations import alike, read_of
from .runs import as_one
from .substitution import change_term, merge
from .terms import Form, Join, Product, Term, Unread


def factored(term: Term) -> Term:
    """A join of products as a product with a join; the term itself if it is not such a join."""
    join = term.parts
    if not isinstance(join, Join):
        return term
    products = [s.term.parts for s in join.segments if isinstance(s.term.parts, Product)]
    first = products[0] if len(products) == len(join.segments) else None
    if first is None or any(p.scale != first.scale or not alike(p.summed, first.summed) for p in products):
        return term
    own = [dict(zip(p.summed, first.summed, strict=True)) for p in products]
    sides = [(change_term(p.left, axes), change_term(p.right, axes)) for p, axes in zip(products, own, strict=True)]
    for side in (0, 1):
        whole = _in_one(join, [pair[side] for pair in sides])
        if whole is None:
            continue
        others = tuple(replace(s, term=pair[1 - side]) for s, pair in zip(join.segments, sides, strict=True))
        row = Term(read_of(Unread(term.read.source), ()).read, Join(join.axis, others))
        row = replace(row, read=read_of(row.read.source, [(axis,) for axis in row.axes]).read)
        left, right = (whole, row) if side == 0 else (row, whole)
        return replace(term, parts=Product(left, right, first.summed, first.scale))
    return term


def _in_one(join: Join, pieces: list[Term]) -> Term | None:
    """The pieces of a join as a read of one tensor that differs along the join's axis; None if there is no such
    tensor."""
    first, *rest = (Form((s.axes,), Term(piece.read)) for s, piece in zip(join.segments, pieces, strict=True))
    run: Form | None = first
    for piece in rest:
        run = None if run is None else as_one(run.term.read.source, run, piece, 0)
    if run is None or isinstance(run.term.read.source, Unread):
        return None
    read = merge(run.term.read, run.dims[0], join.axis)
    return Term(read) if join.axis in read.axes else None
