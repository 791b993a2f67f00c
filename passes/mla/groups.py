"""Divide attention whose groups of heads have a latent each into one attention for each group.

key[b, g, n, t, p] = sum_l latent[b, t, g, l] W_UK[g, n, p, l]

Each group may also have its latent and weights in tensors of its own, with keys or values joined over heads:

value[b, n, t, v] = sum_l latent_0[b, t, l] W_0[n, v, l]            n < N / 2
                    sum_l latent_1[b, t, l] W_1[n - N / 2, v, l]    else
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from ..algebra.sizes import Size, Unaligned, product, same
from ..algebra.substitution import Pin, Split
from ..algebra.terms import Axis, Dim, Join, Term
from ..attention.attention import Attention
from ..attention.changed import changed
from ..nodes.refusal import Refusal
from .products import summands, up_projection
from .site import Site

MOST_GROUPS = 8
"""The most groups for which one op each is emitted."""
_SHARE = "share one latent between all heads"


def groups_of(attention: Attention, axes: Dim) -> list[Attention]:
    """The attention of each group, where `axes` are the rows that both latents and up-projections have.

    Raises:
        Refusal: if there are too many groups, if only a run knows how many, or if all scores have to exist at once.
    """
    _check_number(attention, product(axis.size for axis in axes))
    if attention.opaque is not None:
        reason = (
            "expected scores that are a sum of products and masks where groups of heads have "
            "a latent each, found other scores"
        )
        raise Refusal(attention.node, reason, _SHARE)
    sizes = [range(int(axis.size)) for axis in axes]
    return [
        changed(attention, {axis: Pin(index) for axis, index in zip(axes, indices, strict=True)})
        for indices in itertools.product(*sizes)
    ]


def flat(attention: Attention, axes: Dim, sites: Sequence[Site]) -> tuple[Dim, tuple[Site, ...]]:
    """The axes and the sites of the groups of an attention, over `axes`, if each may be divided into groups itself.

    Raises:
        Refusal: if not all are divided alike, or if there are too many.
    """
    inner = {site.groups.axes if site.groups is not None else () for site in sites}
    if len(inner) > 1:
        reason = "expected groups of heads that have a latent each, found some that have several"
        raise Refusal(attention.node, reason, _SHARE)
    (within,) = inner
    all_sites = tuple(own for site in sites for own in (site.groups.sites if site.groups is not None else (site,)))
    _check_number(attention, len(all_sites))
    return (*axes, *within), all_sites


def in_groups(attention: Attention) -> tuple[Attention, Dim] | None:
    """An attention whose values or keys are joined over heads, and the axes over the pieces; None where none are."""
    terms = attention.value, *(score.key for score in attention.scores)
    for join in (join for term in terms for join in _joins(term)):
        heads = join.segments[0].size
        if join.axis not in attention.rows or not all(same(segment.size, heads) for segment in join.segments):
            continue
        if same(heads, 1):
            return attention, (join.axis,)
        group = Axis(len(join.segments))
        with contextlib.suppress(Unaligned):
            return changed(attention, {join.axis: Split(group, Axis(heads))}), (group,)
    return None


def with_latents(attention: Attention) -> Dim:
    """The rows for which latents, of keys or of values, differ as their up-projections do; empty if there are none."""
    keys = {*attention.keys}
    terms = attention.value, *(score.key for score in attention.scores)
    found = [up_projection(summand, keys) for term in terms for summand in summands(term, keys)]
    differ = set[Axis]().union(*(up.latent.axes & up.weight.axes for up in found if up is not None))
    return tuple(axis for axis in attention.rows if axis in differ)


def _check_number(attention: Attention, count: Size) -> None:
    """Raise Refusal if there are too many groups, or only a run knows how many."""
    if not isinstance(count, int) or count > MOST_GROUPS:
        reason = f"expected at most {MOST_GROUPS} groups of heads with a latent each, found {count}"
        raise Refusal(attention.node, reason, _SHARE)


def _joins(term: Term) -> Iterator[Join]:
    """The join that a term is, and those that its pieces are."""
    if isinstance(term.parts, Join):
        yield term.parts
        for segment in term.parts.segments:
            yield from _joins(segment.term)
