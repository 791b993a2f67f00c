"""Join latents instead of the keys and values that are made of them, where some tokens are the same for all sequences.

    value = cat(prefix W_UV, repeated for each sequence; latent W_UV)   =   cat(prefix, repeated; latent) W_UV

A prompt that all sequences begin with is such a prefix. Pieces that differ between the same rows are one product
already in the trace, which does not know rows from columns: what repeats there may also be columns that heads share.
"""

from __future__ import annotations

from dataclasses import replace

from ..algebra.runs import as_one
from ..algebra.substitution import change_term
from ..algebra.terms import Axis, Form, Join, Term
from ..attention.attention import Attention


def with_joined_latents(attention: Attention) -> Attention | None:
    """An attention with such keys and values as products of joined latents; None if it has none."""
    keys = {*attention.keys}
    value = _joined(attention.value, keys)
    scores = tuple(replace(score, key=_joined(score.key, keys)) for score in attention.scores)
    if value is attention.value and all(a.key is b.key for a, b in zip(scores, attention.scores, strict=True)):
        return None
    return replace(attention, value=value, scores=scores)


def _joined(term: Term, keys: set[Axis]) -> Term:
    """A term, or its pieces, with products that are joined along the keys as one; the term itself if it has none."""
    join = term.parts
    if not isinstance(join, Join):
        return term
    if join.axis in keys:
        return _in_one(term, join)
    pieces = [_joined(segment.term, keys) for segment in join.segments]
    if all(piece is segment.term for piece, segment in zip(pieces, join.segments, strict=True)):
        return term
    segments = tuple(replace(s, term=piece) for s, piece in zip(join.segments, pieces, strict=True))
    return replace(term, parts=replace(join, segments=segments))


def _in_one(term: Term, join: Join) -> Term:
    first, *others = (Form((segment.axes,), segment.term) for segment in join.segments)
    run: Form | None = first
    for piece in others:
        run = None if run is None else as_one(None, run, piece, 0, joins=True, repeats=True)
    if run is None or run.term.parts is None or len(run.dims[0]) != 1:
        return term
    return replace(term, parts=change_term(run.term, {run.dims[0][0]: join.axis}).parts)
