"""Move factors of keys to the queries, where a factor is the same for all keys.

sum_d q[s, d] (k[t, d] g[d])          =      sum_d (q[s, d] g[d]) k[t, d]

A number in a tensor that multiplies the scores, as a scale that is learned or a buffer, is a factor of the keys too
where these are an input of the graph, such as a cache of latents: the trace moves it there, as it does to a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..algebra import made
from ..algebra.terms import Axis, How, Term
from ..attention.attention import Attention, Score
from ..attention.outer import Multiplied, multiplied, times
from ..trace.coded import is_coded
from ..trace.trace import Trace


def with_scaled_queries(attention: Attention, trace: Trace) -> Attention:
    """An attention with such factors of its whole keys moved to its queries."""
    keys = set(attention.keys)
    return replace(attention, scores=tuple(with_scaled_query(score, keys, trace) for score in attention.scores))


def with_scaled_query(score: Score, keys: set[Axis], trace: Trace) -> Score:
    """A score with such factors of its key moved to its query. Keys that the graph multiplies by scales of FP8 and INT8
    keep these: ops take them."""

    def factors(key: Term) -> Iterator[Multiplied]:
        of_graph = (m for m in multiplied(key, trace) if not is_coded(m.of))
        return (m for m in (*_made(key), *of_graph) if m.by.axes.isdisjoint(keys))

    while (found := next(factors(score.key), None)) is not None:
        query = times(score.query, found.by.read, divides=found.divides)
        score = Score(query, found.of, score.summed, score.scale * found.number)
    return score


def _made(key: Term) -> Iterator[Multiplied]:
    """A key that is multiplied in no tensor of the graph, as its tensor and its factor."""
    found = made.factors(key.read) if key.parts is None else None
    if found is not None and found[2] is How.TIMES:
        of, by, _ = found
        yield Multiplied(Term(of), Term(by), 1.0, divides=False)
