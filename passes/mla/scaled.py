"""Keys that were multiplied by what no key has one of its own of: that may as well be multiplied with the query.

sum_d q[s, d] (k[t, d] g[d])          =      sum_d (q[s, d] g[d]) k[t, d]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..algebra.terms import Axis, Term
from ..attention.attention import Attention, Score
from ..attention.outer import Multiplied, multiplied, times
from ..trace.coded import is_coded
from ..trace.trace import Trace


def with_scaled_queries(attention: Attention, trace: Trace) -> Attention:
    """An attention whose whole keys are as they were before such factors."""
    keys = set(attention.keys)
    return replace(attention, scores=tuple(with_scaled_query(score, keys, trace) for score in attention.scores))


def with_scaled_query(score: Score, keys: set[Axis], trace: Trace) -> Score:
    """A score whose key is as it was before such factors. Scales of numbers in a byte stay theirs: ops take them so."""

    def factors(key: Term) -> Iterator[Multiplied]:
        return (m for m in multiplied(key, trace) if m.by.axes.isdisjoint(keys) and not is_coded(m.of))

    while (found := next(factors(score.key), None)) is not None:
        query = times(score.query, found.by.read, divides=found.divides)
        score = Score(query, found.of, score.summed, score.scale * found.number)
    return score
