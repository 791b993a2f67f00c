"""Move factors of keys to the queries, where a factor is the same for all keys.

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
    """An attention with such factors of its whole keys moved to its queries."""
    keys = set(attention.keys)
    return replace(attention, scores=tuple(with_scaled_query(score, keys, trace) for score in attention.scores))


def with_scaled_query(score: Score, keys: set[Axis], trace: Trace) -> Score:
    """A score with such factors of its key moved to its query. Scales of FP8 and INT8 stay: ops take them."""

    def factors(key: Term) -> Iterator[Multiplied]:
        return (m for m in multiplied(key, trace) if m.by.axes.isdisjoint(keys) and not is_coded(m.of))

    while (found := next(factors(score.key), None)) is not None:
        query = times(score.query, found.by.read, divides=found.divides)
        score = Score(query, found.of, score.summed, score.scale * found.number)
    return score
