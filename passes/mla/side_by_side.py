"""Make one up-projection of several columns of the keys that come from one latent.

q_1 . (W_1 latent) + q_2 . (W_2 latent) + q_r . k_rope   =   [q_1, q_2] . ([W_1, W_2] latent) + q_r . k_rope

Columns that all heads share are a rope key beside columns of each head, whatever they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.made import joined
from ..algebra.runs import as_one
from ..algebra.sizes import total
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Form, Product, Read, Term, Unread
from ..attention.attention import Attention
from .computed import computed
from .products import UpProjection, times
from .readable import is_held
from .site import Piece

_Columns = tuple[Piece, UpProjection]
"""Columns of the keys, and what they are up-projected from."""


def side_by_side(attention: Attention, pieces: Sequence[Piece], found: Sequence[UpProjection | None]) -> list[Piece]:
    """The pieces of the keys, with those that are up-projections of the latent of the values, as `found`, made one.

    They stay several if the graph does not hold all that is read, or if a function of the scores stands between them.
    """
    up_projected = [(piece, up) for piece, up in zip(pieces, found, strict=True) if up is not None]
    rows = {*attention.rows}
    own = [(piece, up) for piece, up in up_projected if up.weight.axes & rows] or up_projected
    shared = [piece for piece, _ in up_projected if not any(piece is other for other, _ in own)]
    if len(up_projected) < 2 or not all(is_held(piece.key.read) for piece in shared):
        return [*pieces]
    if attention.opaque is not None and len({piece.of for piece, _ in own}) > 1:
        return [*pieces]
    one, *others = own
    for columns in others:
        if (both := _both(one, columns)) is None:
            return [*pieces]
        one = both
    ropes = [replace(piece, key=Term(piece.key.read)) for piece in shared]
    return [one[0], *ropes, *(p for p in pieces if not any(p is other for other, _ in up_projected))]


def _both(first: _Columns, second: _Columns) -> _Columns | None:
    """Columns side by side: `first`, whose scale both get, then `second`; None if they cannot be read together."""
    (a, up), (b, other) = first, second
    a, b = computed(a), computed(b)
    scale = a.scale * up.scale
    if scale == 0 or not all(map(is_held, (a.query.read, b.query.read, up.weight, other.weight))):
        return None
    alike = change_read(other.weight, dict(zip(other.rank, up.rank, strict=True)))
    alike = times(alike, b.scale * other.scale / scale)
    axis = Axis(total([a.width, b.width]))
    query = _one_read(a.query.read, b.query.read, (a.summed, b.summed), axis)
    weight = _one_read(up.weight, alike, (a.summed, b.summed), axis)
    if query is None or weight is None:
        return None
    product = Product(up.latent, Term(weight), up.rank)
    key = Term(replace(a.key.read, source=Unread(a.key.read.source)), product)
    piece = Piece(Term(query), key, (axis,), scale, a.of)
    return piece, UpProjection(up.latent, weight, up.rank, 1.0)


def _one_read(first: Read, second: Read, along: tuple[Dim, Dim], axis: Axis) -> Read | None:
    """Two reads one behind the other along `axis`: of one tensor if they are adjacent in it, else of two."""
    run = as_one(None, Form((along[0],), Term(first)), Form((along[1],), Term(second)), 0)
    if run is not None and len(run.dims[0]) == 1:
        return change_read(run.term.read, {run.dims[0][0]: axis})
    return joined(first, second, along, axis)
