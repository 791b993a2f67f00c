"""Zeros that are joined to keys and values, as what a latent of zeros is up-projected to.

    cat([0, latent W_UV])   =   cat([0, latent]) W_UV

A null key (`add_zero_attn`) and padding look like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.made import constant
from ..algebra.terms import Axis, Dim, Join, Product, Read, Segment, Sum, Term, Unread, Zero


def with_zeros_made(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Pieces of a join, of which zeros are made as another piece is; as they are, if they cannot be."""
    zeros = [isinstance(segment.term.parts, Zero) for segment in segments]
    pattern = next((s for s, is_zero in zip(segments, zeros, strict=True) if not is_zero), None)
    if pattern is None or not any(zeros):
        return segments
    made = list[Segment]()
    for segment, is_zero in zip(segments, zeros, strict=True):
        term = _zeros(pattern.term, {*pattern.axes}, segment.axes) if is_zero else segment.term
        if term is None:
            return segments
        made.append(replace(segment, term=term))
    return made


def _zeros(like: Term, along: set[Axis], axes: Dim) -> Term | None:
    """Zeros over `axes` in the place of those `along` which `like` runs, made as that is; None if a part of it does not
    run along these, and so is not 0."""

    def unread(parts: Product | Sum | Join) -> Term:
        return Term(replace(_number(like.read, along, axes), source=Unread(like.read.source)), parts)

    match like.parts:
        case Zero():
            return Term(_number(like.read, along, axes), like.parts)
        case Product(left, right, summed, scale):
            if bool(left.axes & along) == bool(right.axes & along):
                return None
            left, right = (Term(_number(t.read, along, axes)) if t.axes & along else t for t in (left, right))
            return unread(Product(left, right, summed, scale))
        case Sum(terms):
            addends = [_zeros(term, along, axes) for term in terms]
            known = tuple(addend for addend in addends if addend is not None)
            return unread(Sum(known)) if len(known) == len(terms) else None
        case Join(axis, segments) if axis not in along:
            pieces = [_zeros(segment.term, along, axes) for segment in segments]
            own = tuple(replace(s, term=p) for s, p in zip(segments, pieces, strict=True) if p is not None)
            return unread(Join(axis, own)) if len(own) == len(segments) else None
        case None if like.axes & along:
            return Term(_number(like.read, along, axes))
    return None


def _number(like: Read, along: set[Axis], axes: Dim) -> Read:
    """0 over the axes of `like`, with `axes` in the place of those `along` which it runs."""
    others = dict.fromkeys(d.axis for d in like.digits if d.axis is not None and d.axis not in along)
    return constant(like, 0.0, (*others, *axes))
