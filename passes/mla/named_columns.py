"""Columns of keys that an index names: queries are put in the places from which it takes them.

    key[t, j] = before[t, index[j]]
    sum_j q[s, j] key[t, j]  =  sum_m (sum_j q[s, j] [index[j] = m]) before[t, m]

A buffer that puts the columns of a rope back to where they were, or in another order, is such an index. A column that
the index leaves out meets a query that is 0 there, which adds nothing to a finite number; one that it names twice meets
the sum of two.
"""

from __future__ import annotations

from dataclasses import replace

from ..algebra.gathers import lookup_of
from ..algebra.made import contracted, named
from ..algebra.terms import Axis, Term
from ..attention.attention import Attention, Score
from ..attention.outer import in_own_dtype
from ..trace.trace import Trace
from .readable import is_held


def with_named_columns(attention: Attention, trace: Trace) -> Attention | None:
    """An attention to keys as they were before an index named their columns; None if none did."""
    keys = {*attention.keys}
    scores = tuple(_before(score, keys, trace) for score in attention.scores)
    if all(a is b for a, b in zip(scores, attention.scores, strict=True)):
        return None
    return replace(attention, scores=scores)


def _before(score: Score, keys: set[Axis], trace: Trace) -> Score:
    lookup = lookup_of(score.key)
    if lookup is None or lookup.flat is not None or lookup.scales is not None or lookup.then:
        return score
    if lookup.entry in keys or not lookup.table.axes or not lookup.table.axes <= {*score.summed}:
        return score
    if not is_held(score.query.read) or {*score.summed} & lookup.pages.axes != {*score.summed} - lookup.table.axes:
        return score
    ones = named(score.query.read, lookup.table, lookup.entry)
    along = tuple(axis for axis in score.summed if axis in lookup.table.axes)
    query = Term(in_own_dtype(contracted(score.query.read, ones, along), score.query.read))
    summed = (lookup.entry, *(axis for axis in score.summed if axis not in lookup.table.axes))
    return Score(query, trace.at(lookup.pages), summed, score.scale)
