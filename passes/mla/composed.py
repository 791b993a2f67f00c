"""Make one up-projection of two linear maps in a row, between which is no latent, or one at least twice as wide.

    value[b, n, t, v] = sum_m (sum_l latent[b, t, l] A[n, m, l] + a[n, m]) B[n, v, m]
                      = sum_l latent[b, t, l] (B A)[n, v, l] + (B a)[n, v]

If each head has an intermediate of its own, heads do not share it. If they do (there is no `n` in A), it is a latent,
and stays one unless what it is made of is at most half as wide: hidden states that are hardly narrower than the latent
would only cost a product of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.joins import stacked
from ..algebra.made import contracted
from ..algebra.sizes import known_at_most, product, total
from ..algebra.terms import Axis, Dim, Join, Product, Sum, Term, Unread
from ..attention.attention import Attention
from .products import UpProjection, times, up_projection


def composed(attention: Attention) -> Attention | None:
    """An attention whose keys and values are up-projections in one step; None if none of them had two."""
    keys, rows = {*attention.keys}, {*attention.rows}
    value = _composed(attention.value, keys, rows)
    scores = tuple(replace(s, key=_composed(s.key, keys, rows)) for s in attention.scores)
    if value is attention.value and all(a.key is b.key for a, b in zip(scores, attention.scores, strict=True)):
        return None
    return replace(attention, value=value, scores=scores)


def _is_half_as_wide(rank: Dim, other: Dim) -> bool:
    """Whether a latent over the axes `rank` has at most half the columns of one over `other`."""
    width, wider = (product(axis.size for axis in axes) for axes in (rank, other))
    return known_at_most(total([width, width]), wider)


def _composed(term: Term, keys: set[Axis], rows: set[Axis]) -> Term:
    """A term with every such product in its pieces and addends composed; the term itself if it has none."""
    match term.parts:
        case Join(axis, segments):
            one = stacked(term, nested=True) if axis in rows else term
            if one is not term and (made := _composed(one, keys, rows)) is not one:
                return made
            pieces = [_composed(segment.term, keys, rows) for segment in segments]
            if all(piece is segment.term for piece, segment in zip(pieces, segments, strict=True)):
                return term
            own = tuple(replace(s, term=piece) for s, piece in zip(segments, pieces, strict=True))
            return replace(term, parts=replace(term.parts, segments=own))
        case Sum(terms):
            addends = [_composed(addend, keys, rows) for addend in terms]
            if all(a is b for a, b in zip(addends, terms, strict=True)):
                return term
            return replace(term, parts=Sum(tuple(one for addend in addends for one in _addends(addend))))
        case Product():
            outer = up_projection(term, keys)
            inner = None if outer is None else _addends(_composed(outer.latent, keys, rows))
            sums = None if outer is None or inner is None else _distributed(term, outer, inner, keys, rows)
            return sums or term
    return term


def _addends(term: Term) -> Sequence[Term]:
    return term.parts.terms if isinstance(term.parts, Sum) else (term,)


def _distributed(
    whole: Term, outer: UpProjection, inner: Sequence[Term], keys: set[Axis], rows: set[Axis]
) -> Term | None:
    """The sum `inner`, times the weight of `outer`, addend by addend.

    None if an addend that differs between keys is no up-projection whose weight gives each head its own.
    """

    def unread(parts: Product | Sum) -> Term:
        return Term(replace(whole.read, source=Unread(whole.read.source)), parts)

    made = list[Term]()
    for addend in inner:
        if addend.axes.isdisjoint(keys):
            made.append(Term(times(contracted(addend.read, outer.weight, outer.rank), outer.scale)))
            continue
        first = up_projection(addend, keys)
        if first is None or not first.latent.axes.isdisjoint(outer.rank):
            return None
        if not (first.weight.axes & rows) - first.latent.axes and not _is_half_as_wide(first.rank, outer.rank):
            return None
        weight = times(contracted(first.weight, outer.weight, outer.rank), first.scale)
        made.append(unread(Product(first.latent, Term(weight), first.rank, outer.scale)))
    return made[0] if len(made) == 1 else unread(Sum(tuple(made)))
