"""Attention whose groups of heads have a latent each is one attention for each group, beside one another.

key[b, g, n, t, p] = sum_l latent[b, t, g, l] W_UK[g, n, p, l]
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..algebra.sizes import product
from ..algebra.substitution import Change, Pin, change_term
from ..algebra.terms import Axis, Dim, Term
from ..attention.find import Attention
from ..nodes.refusal import Refusal

MOST_GROUPS = 8
"""Groups up to which an op for each is emitted."""


def groups_of(attention: Attention, axes: Dim) -> list[Attention]:
    """The attention of each group, `axes` being those that latents and up-projections have both.

    Raises:
        Refusal: if there are too many groups, or as many as only a run knows, or scores that have to exist as a whole.
    """
    count = product(axis.size for axis in axes)
    if not isinstance(count, int) or count > MOST_GROUPS or attention.opaque is not None:
        reason = f"expected at most {MOST_GROUPS} groups of heads with a latent each, found {count}"
        if isinstance(count, int) and count <= MOST_GROUPS:
            reason = "expected a sum of products and masks for groups of heads with a latent each, found other scores"
        raise Refusal(attention.node, reason, "share one latent between all heads")
    sizes = [range(int(axis.size)) for axis in axes]
    return [
        _pinned(attention, {axis: Pin(index) for axis, index in zip(axes, indices, strict=True)})
        for indices in itertools.product(*sizes)
    ]


def _pinned(attention: Attention, pins: dict[Axis, Change]) -> Attention:
    """An attention at one index of some of its rows."""

    def without(dim: Dim) -> Dim:
        return tuple(axis for axis in dim if axis not in pins)

    def at(term: Term) -> Term:
        return change_term(term, pins)

    return replace(
        attention,
        dims=tuple(map(without, attention.dims)),
        rows=without(attention.rows),
        scores=tuple(replace(score, query=at(score.query), key=at(score.key)) for score in attention.scores),
        value=at(attention.value),
        masks=tuple(replace(mask, term=at(mask.term)) for mask in attention.masks),
        sinks=tuple(replace(sink, term=at(sink.term)) for sink in attention.sinks),
    )
