"""Join latents or weights instead of the keys and values that are made of them.

    value = cat(prompt W_UV, repeated for each sequence; latent W_UV)   =   cat(prompt, repeated; latent) W_UV
    value = cat(latent W[:, :i], latent W[:, j:])                       =   latent cat(W[:, :i], W[:, j:])
    key   = stack([cat(latent W_0, rope), cat(latent W_1, rope)])       =   cat(latent stack([W_0, W_1]), rope)

A prompt that all sequences begin with has such keys and values. Pieces that differ between the same rows, and parts of
two weights, are one product already in the trace, which does not know rows from columns: what repeats there may be
columns that heads share, and parts of one product may be those of a rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.runs import as_one
from ..algebra.substitution import change_term
from ..algebra.terms import Axis, Form, Join, Segment, Term
from ..attention.attention import Attention
from .zero_pieces import with_zeros_made


def with_joined_factors(attention: Attention) -> Attention | None:
    """An attention with keys and values that are joined over tokens or heads, and values that are joined over columns,
    as products of joined factors; None if it has none."""
    keys = {*attention.keys}
    along = keys | {*attention.rows}
    value = _joined(attention.value, along | {*attention.columns}, keys)
    scores = tuple(replace(score, key=_joined(score.key, along, keys)) for score in attention.scores)
    if value is attention.value and all(a.key is b.key for a, b in zip(scores, attention.scores, strict=True)):
        return None
    return replace(attention, value=value, scores=scores)


def _joined(term: Term, along: set[Axis], keys: set[Axis]) -> Term:
    """A term, or its pieces, with products that are joined along one of these axes as one, along those of the keys also
    with zeros; the term itself if it has none."""
    join = term.parts
    if not isinstance(join, Join):
        return term
    segments = with_zeros_made(join.segments) if join.axis in keys else join.segments
    if join.axis in along and (one := _in_one(term, join.axis, segments)) is not term:
        return one
    pieces = [_joined(segment.term, along, keys) for segment in join.segments]
    if all(piece is segment.term for piece, segment in zip(pieces, join.segments, strict=True)):
        return term
    own = tuple(replace(s, term=piece) for s, piece in zip(join.segments, pieces, strict=True))
    return replace(term, parts=replace(join, segments=own))


def _in_one(term: Term, axis: Axis, segments: Sequence[Segment]) -> Term:
    """A term that is joined of products along an axis as one product, or a sum of one; the term itself if it is not."""
    first, *others = (Form((segment.axes,), segment.term) for segment in segments)
    run: Form | None = first
    for piece in others:
        run = None if run is None else as_one(None, run, piece, 0, joins=True, loosely=True)
    if run is None or run.term.parts is None or len(run.dims[0]) != 1:
        return term
    return replace(term, parts=change_term(run.term, {run.dims[0][0]: axis}).parts)
