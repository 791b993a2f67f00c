"""Keys and values that are each up-projected from a latent of their own.

    key[b, n, t, p]   = sum_l latent_k[b, t, l] W_UK[n, p, l]
    value[b, n, t, v] = sum_l latent_v[b, t, l] W_UV[n, v, l]
    score[b, s, n, t] = sum_l (sum_p query[b, s, n, p] W_UK[n, p, l]) latent_k[b, t, l]

For few queries, that of the keys is a rope key beside the values' latent: all heads share it, and W_UK goes to the
queries. There are no nope columns. The same holds for keys that heads share as they are, beside values that they do
not share. Rope keys that each head has for itself are added to the scores (see `own_ropes`). For many queries, keys
are up-projected from their own latent, and values from theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.made import contracted
from ..algebra.terms import Axis, Sum, Term
from ..attention.attention import Attention
from .products import gathered, up_projection
from .site import OwnLatent, Piece, Site


def shared_by_heads(
    attention: Attention, pieces: Sequence[Piece], heads: set[Axis]
) -> tuple[list[Piece], list[Piece]] | None:
    """Pieces of the keys over what all `heads` share, up-projected ones first, then those that heads have for
    themselves; and pieces that all keys have alike.

    None if there are no shared pieces, or none of them is up-projected while heads have others for themselves.
    """
    keys = {*attention.keys}
    parts = [part for piece in pieces for part in _without_bias(piece, keys)]
    same = [part for part in parts if part.key.axes.isdisjoint(keys)]
    differ = [(part, _over_its_latent(part, attention)) for part in parts if not part.key.axes.isdisjoint(keys)]
    differ.sort(key=lambda pair: pair[0] is pair[1])  # up-projected ones first
    shared = [(part, piece) for part, piece in differ if piece.key.axes.isdisjoint(heads)]
    own = [piece for _, piece in differ if not piece.key.axes.isdisjoint(heads)]
    if not (heads and shared) or (own and shared[0][0] is shared[0][1]):
        return None
    return [*(piece for _, piece in shared), *own], same


def own_latent(attention: Attention, pieces: Sequence[Piece], heads: set[Axis]) -> OwnLatent | None:
    """The latent from which alone keys that are `shared_by_heads` are up-projected; None if there is not just one."""
    keys = {*attention.keys}
    parts = [part for piece in pieces for part in _without_bias(piece, keys) if not part.key.axes.isdisjoint(keys)]
    up_projected = [part for part in parts if _over_its_latent(part, attention) is not part]
    if len(up_projected) != 1:
        return None
    (nope,) = up_projected
    factors = up_projection(nope.key, keys)
    assert factors is not None
    if not factors.latent.axes.isdisjoint(heads):
        return None
    ropes = tuple(part for part in parts if part is not nope and part.key.axes.isdisjoint(heads))
    nope = replace(nope, scale=nope.scale * factors.scale)
    return OwnLatent(factors.latent, factors.rank, factors.weight, nope, ropes)


def up_projected_apart(site: Site) -> Site:
    """A site whose keys and values are each up-projected, if they have a latent each; else the same."""
    own = site.of_keys
    if own is None:
        return site
    return replace(site, apart=False, nope=own.nope, ropes=own.ropes, w_uk=own.w_uk)


def _without_bias(piece: Piece, keys: set[Axis]) -> list[Piece]:
    """The terms of a sum of an up-projection and of what is the same for all keys; any other piece as it is."""
    if not isinstance(piece.key.parts, Sum):
        return [piece]
    terms = gathered(piece.key.parts.terms, keys)
    varying = [term for term in terms if term.axes & keys]
    if len(varying) != 1 or up_projection(varying[0], keys) is None:
        return [piece]
    return [replace(piece, key=term) for term in terms]


def _over_its_latent(piece: Piece, attention: Attention) -> Piece:
    """An up-projected piece whose weight has heads, over its latent; any other piece as it is."""
    factors = up_projection(piece.key, {*attention.keys})
    if factors is None or factors.weight.axes.isdisjoint(attention.rows):
        return piece
    if not factors.latent.axes.isdisjoint(piece.summed) or not {*piece.summed} <= factors.weight.axes:
        return piece
    query = Term(contracted(piece.query.read, factors.weight, piece.summed))
    scale = piece.scale * factors.scale
    return replace(piece, query=query, key=factors.latent, summed=factors.rank, scale=scale)
