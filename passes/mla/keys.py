"""Tell the nope columns of the keys, which come from the latent of the values, from rope keys and what is the same for
all keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..algebra.substitution import change_read, change_term
from ..algebra.terms import Axis, Read
from ..attention.attention import Attention
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .apart import own_latent, shared_by_heads
from .of_latent import absorbed, up_projected
from .pieces import around, pieces_of
from .same_keys import with_summed_queries
from .side_by_side import side_by_side
from .site import OwnLatent, Piece
from .values import Values
from .why_not import no_up_projection, stored_expanded


@dataclass(frozen=True)
class Keys:
    """The pieces of the keys: nope columns, which `w_uk` makes, rope keys, and what is the same for all keys.

    The last adds one number to all scores of a row, which a softmax does not see. If the keys have a latent of their
    own, all of them are ropes, and `own_latent` tells what they are up-projected from.
    """

    w_uk: Read | None
    nope: Piece
    ropes: list[Piece]
    shifts: list[Piece]
    own_latent: OwnLatent | None = None


def told_apart(attention: Attention, values: Values, trace: Trace, *, apart: bool) -> tuple[Values, Keys]:
    """The values over the axes of the nope columns, and the pieces of the keys."""
    node, keys = attention.node, set(attention.keys)
    latent, rank, w_uv = values.latent, values.rank, values.w_uv
    w_uk: Read | None = None
    nope: Piece | None = None
    ropes: list[Piece] = []
    shifts: list[Piece] = []
    weight_heads = set(w_uv.axes.intersection(attention.rows)) if w_uv else set[Axis]()
    pieces = [
        replace(part, of=i)
        for i, score in enumerate(attention.scores)
        for piece in pieces_of(node, score, keys, weight_heads, values, trace)
        for part in around(piece, latent.read, rank)
    ]
    pieces = with_summed_queries(attention, pieces)
    for piece in side_by_side(attention, pieces, [up_projected(piece, keys, latent, rank) for piece in pieces]):
        if piece.key.axes.isdisjoint(keys):
            shifts.append(piece)
            continue
        factors = up_projected(piece, keys, latent, rank)
        if factors is None and not absorbed(piece, latent, rank):
            ropes.append(piece)
            continue
        if nope is not None:
            raise Refusal(node, "expected one part of the keys to come from the latent of the values, found two")
        nope = piece
        if factors is not None:
            w_uk, summed = factors.weight, factors.rank
            nope = replace(piece, scale=piece.scale * factors.scale)
            latent = change_term(latent, dict(zip(rank, summed, strict=True)))
        else:
            latent, summed = piece.key, piece.summed
        w_uv = change_read(w_uv, dict(zip(rank, summed, strict=True))) if w_uv is not None else None
        rank = summed
    if nope is None and apart and w_uv is not None:
        found_apart = shared_by_heads(attention, ropes, weight_heads)
        if found_apart is not None:
            shared, same_for_all = found_apart
            of_keys = own_latent(attention, ropes, weight_heads)
            return values, Keys(None, shared[0], shared, [*shifts, *same_for_all], of_keys)
    if nope is None or apart:
        found = values.latent.read if w_uv is not None else None
        raise stored_expanded(attention, trace) or no_up_projection(attention, [p.key for p in pieces], found, trace)
    return replace(values, latent=latent, rank=rank, w_uv=w_uv), Keys(w_uk, nope, ropes, shifts)
