"""An attention over other axes."""

from __future__ import annotations

from dataclasses import replace

from ..algebra.substitution import Changes, change_axes, change_term
from ..algebra.terms import Dim, Term
from .attention import Attention


def changed(attention: Attention, changes: Changes) -> Attention:
    """An attention with some of its axes split, pinned to one index, or renamed.

    Raises:
        Unaligned: if a term cannot express that.
    """

    def axes(dim: Dim) -> Dim:
        return change_axes(dim, changes)

    def at(term: Term) -> Term:
        return change_term(term, changes)

    return replace(
        attention,
        dims=tuple(map(axes, attention.dims)),
        rows=axes(attention.rows),
        keys=axes(attention.keys),
        columns=axes(attention.columns),
        queries=None if attention.queries is None else axes(attention.queries),
        scores=tuple(
            replace(score, query=at(score.query), key=at(score.key), summed=axes(score.summed))
            for score in attention.scores
        ),
        value=at(attention.value),
        masks=tuple(replace(mask, term=at(mask.term)) for mask in attention.masks),
        sinks=tuple(replace(sink, term=at(sink.term)) for sink in attention.sinks),
    )
