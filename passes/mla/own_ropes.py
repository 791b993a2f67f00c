"""Rope keys that every head, or every query, has for itself.

    score[b, s, n, t] = sum_l q_latent[b, s, n, l] latent[b, t, l] + sum_r q_rope[b, s, n, r] k_rope[b, n, t, r]

What heads do not share cannot be columns beside the latent. Where queries attend to the latent, the second sum is
computed as in the user's code, whatever its keys are made of, and added to the scores like any bias, before masks
replace scores by numbers. Keys that are up-projected take such columns as they take any others, unless each query has
some of its own, as with an embedding of its distance to each key: what these add is a bias of the scores everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.made import contracted
from ..algebra.terms import Axis, Term
from ..attention.attention import Attention
from ..attention.summands import Mask
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .site import Piece, Site
from .why_not import describe

SHARE = "compute one rope key per token, [B, T, R], and share it between all heads"
OF_HEADS, OF_QUERIES = "own ropes", "keys of queries"
"""What a report calls what they add to scores, among the masks."""


def own_of(pieces: Sequence[Piece], axes: set[Axis]) -> tuple[list[Piece], list[Piece]]:
    """The pieces of the keys that are the same along some rows of the scores, and those that are not."""
    shared = [piece for piece in pieces if piece.key.axes.isdisjoint(axes)]
    return shared, [piece for piece in pieces if not piece.key.axes.isdisjoint(axes)]


def as_biases(attention: Attention, pieces: Sequence[Piece], word: str, trace: Trace) -> Attention:
    """An attention with the products of these pieces among its masks, to be added to its scores.

    Raises:
        Refusal: if no tensor can be added to its scores.
    """
    if pieces and (attention.opaque is not None or attention.packed is not None):
        beside, remedy = _obstacle(attention)
        raise Refusal(
            attention.node,
            f"expected {pieces[0].width} columns of the keys to be shared by all heads or to come from the latent "
            f"of the values, found {describe(pieces[0].key, trace)} beside {beside}",
            remedy,
        )
    added = [Mask(_product(piece), attends=False, factor=piece.scale, word=word) for piece in pieces]
    return replace(attention, masks=(*added, *attention.masks))


def _obstacle(attention: Attention) -> tuple[str, str]:
    """Why nothing can be added to the scores of an attention, and what to do about it."""
    if attention.opaque is None:
        return "packed sequences", SHARE
    if attention.opaque.reader is None:
        return "a function of the scores", SHARE
    return (
        "attention weights that are used again",
        f"do not return or use them (transformers: output_attentions), or {SHARE}",
    )


def in_keys(site: Site) -> Site:
    """A site whose rope keys are all columns of its keys, those of each head too, and none of them adds to masks."""
    if not site.own_ropes:
        return site
    masks = tuple(mask for mask in site.attention.masks if mask.word != OF_HEADS)
    attention = replace(site.attention, masks=masks)
    return replace(site, attention=attention, ropes=(*site.ropes, *site.own_ropes), own_ropes=())


def _product(piece: Piece) -> Term:
    return Term(contracted(piece.query.read, piece.key.read, piece.summed))
