"""Prove that an attention is MLA: keys and values are an up-projection of one latent per token.

    key[b, n, t, :P]  = sum_l latent[b, t, l] W_UK[n, p, l]        the nope columns
    key[b, n, t, P:]  = k_rope[b, t, r]                            the rope columns, shared by all heads
    value[b, n, t, v] = sum_l latent[b, t, l] W_UV[n, v, l]

Keys and values may have biases that are the same for all keys. That of the keys adds the same to all scores of a row,
so it leaves the weights as they are; that of the values is added to the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from ..algebra.operations import piece_of
from ..algebra.sizes import Size, same
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Join, Product, Read, Scaled, Stacked, Sum, Term, Undefined, Unread, Zero
from ..attention.find import Attention, Score
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .site import Piece, Site
from .why_not import describe, name, no_up_projection, stored_expanded

_SHARE = "make one rope key a token, [B, T, R], and give it to all heads"


def prove(attention: Attention, trace: Trace) -> Site:
    """The MLA site that an attention is.

    Raises:
        Refusal: what was expected, what was found, and where, if it is none or this cannot be proved.
    """
    node, keys, rows = attention.node, set(attention.keys), set(attention.rows)
    if not keys:
        raise Refusal(node, "expected several keys, found one: its value is the result")
    varying, biases = _apart(attention.value, keys)
    value = _split(varying, keys)
    w_uk: Read | None = None
    w_uv: Read | None = None
    if value is not None:
        latent, w_uv, rank, value_scale = value
        if value_scale != 1.0:
            reason = f"expected values without a scale, found {value_scale:g} times a product"
            raise Refusal(node, reason, "scale what the attention returns")
    else:
        latent, rank = attention.value.read, attention.columns

    nope: Piece | None = None
    ropes: list[Piece] = []
    shifts: list[Piece] = []
    weight_heads = set(w_uv.axes & rows) if w_uv else set[Axis]()
    pieces = [
        replace(piece, of=i) for i, score in enumerate(attention.scores) for piece in _pieces(node, score, weight_heads)
    ]
    for piece in pieces:
        if piece.key.axes.isdisjoint(keys):
            shifts.append(piece)  # adds one number to all scores of a row, which a softmax does not see
            continue
        factors = _up_projected(piece, keys, latent, rank) if w_uv is not None else None
        if factors is None and not (w_uv is None and _absorbed(piece, latent, attention.columns)):
            ropes.append(piece)
            continue
        if nope is not None:
            raise Refusal(node, "expected one part of the keys to come from the latent of the values, found two")
        nope = piece
        if factors is not None:
            _, w_uk, summed, scale = factors
            nope = replace(piece, scale=piece.scale * scale)
            latent = change_read(latent, dict(zip(rank, summed, strict=True)))
            w_uv = change_read(w_uv, dict(zip(rank, summed, strict=True))) if w_uv is not None else None
            rank = summed
        else:
            latent, rank = piece.key.read, piece.summed
    if nope is None:
        found = value[0] if value is not None else None
        raise stored_expanded(attention, trace) or no_up_projection(attention, [p.key for p in pieces], found, trace)

    if nope.scale == 0 or not math.isfinite(nope.scale):
        raise Refusal(node, f"expected scores times a number, found them times {nope.scale:g}")
    heads = {axis for weight in (w_uk, w_uv) if weight is not None for axis in weight.axes} & rows
    batch = {axis for read in (latent, *(rope.key.read for rope in ropes)) for axis in read.axes} & rows
    if heads & batch:
        for rope in ropes:
            if rope.key.axes & heads:
                raise Refusal(
                    node,
                    f"expected {rope.width} columns of the keys to be shared by all heads or to come from the latent "
                    f"of the values, found {describe(rope.key, trace)}",
                    _SHARE,
                )
        raise Refusal(node, "expected a latent and an up-projection without a common axis but the rank, found another")
    tokens = set(attention.queries) if attention.queries is not None else rows - heads - batch
    if tokens & (heads | batch):
        reason = "expected keys and values that are the same for every query, found some that differ"
        raise Refusal(node, reason, "attend to the same keys from every query, and tell them apart by a mask")
    heads = rows - batch - tokens  # also those of the queries alone, which share their keys and values
    for rope in ropes:
        if not rope.key.axes <= batch | keys | set(rope.summed):
            raise Refusal(node, f"expected rope columns shared by all heads, found {describe(rope.key, trace)}", _SHARE)
    reads = [latent, w_uk, w_uv, nope.query.read, *biases]
    reads += [read for piece in (*ropes, *shifts) for read in (piece.query.read, piece.key.read)]
    for read in reads:
        if read is not None and not _is_held(read):
            raise Refusal(node, f"expected operands that the graph holds, found a part of {name(read)}")
    if attention.sinks and node.meta["val"].dtype == torch.float64:
        raise Refusal(node, "expected at most float32 where scores without values share in the weights, found float64")
    return Site(
        attention,
        batch=tuple(axis for axis in attention.rows if axis in batch),
        tokens=tuple(axis for axis in attention.rows if axis in tokens),
        heads=tuple(axis for axis in attention.rows if axis in heads),
        rank=rank,
        latent=latent,
        nope=nope,
        ropes=tuple(ropes),
        w_uk=w_uk,
        w_uv=w_uv,
        biases=biases,
        shifts=tuple(shifts) if attention.sinks or attention.opaque else (),
    )


def _is_held(read: Read) -> bool:
    """Whether all that is read is in tensors of the graph."""
    match read.source:
        case Scaled(of, by):
            return _is_held(of) and _is_held(by)
        case Stacked(pieces):
            return all(map(_is_held, pieces))
    return not isinstance(read.source, Unread)


def _apart(value: Term, keys: set[Axis]) -> tuple[Term, tuple[Read, ...]]:
    """Values as the one term that differs between keys, and what is added to it for all of them."""
    if isinstance(value.parts, Sum):
        varying = [term for term in value.parts.terms if term.axes & keys]
        if len(varying) == 1:
            return varying[0], tuple(term.read for term in value.parts.terms if term.axes.isdisjoint(keys))
    return value, ()


def _split(term: Term, keys: set[Axis]) -> tuple[Read, Read, Dim, float] | None:
    """`latent, weight, summed, scale` of a product of which exactly one factor runs over the keys."""
    if not isinstance(term.parts, Product):
        return None
    left, right = term.parts.left, term.parts.right
    if bool(left.axes & keys) == bool(right.axes & keys):
        return None
    latent, weight = (left, right) if left.axes & keys else (right, left)
    return latent.read, weight.read, term.parts.summed, term.parts.scale


def _up_projected(piece: Piece, keys: set[Axis], latent: Read, rank: Dim) -> tuple[Read, Read, Dim, float] | None:
    """`latent, W_UK, rank, scale` if a piece of the keys is an up-projection of the latent of the values."""
    factors = _split(piece.key, keys)
    if factors is None or not _alike(factors[2], rank):
        return None
    return factors if change_read(latent, dict(zip(rank, factors[2], strict=True))) == factors[0] else None


def _alike(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are made of axes of the same sizes."""
    return len(a) == len(b) and all(same(x.size, y.size) for x, y in zip(a, b, strict=True))


def _absorbed(piece: Piece, value: Read, columns: Dim) -> bool:
    """Whether a piece of the keys is the value itself: attention in latent space, absorbed by hand."""
    if not _alike(piece.summed, columns):
        return False
    return change_read(value, dict(zip(columns, piece.summed, strict=True))) == piece.key.read


def _pieces(node: fx.Node, score: Score, heads: set[Axis]) -> Iterator[Piece]:
    """The columns of a score's contraction, piece by piece as far as the pieces differ between heads, and what is added
    up in them term by term."""
    join = score.key.parts
    if isinstance(join, Zero):
        return
    if isinstance(join, Sum):
        for term in join.terms:
            yield from _pieces(node, replace(score, key=term), heads)
        return
    if not isinstance(join, Join) or join.axis not in score.summed or (heads and not score.key.axes & heads):
        yield Piece(score.query, score.key, score.summed, score.scale)
        return
    start: Size = 0
    for segment in join.segments:
        if isinstance(segment.term.parts, Undefined):
            raise Refusal(node, "expected keys that are written whole, found columns that nobody wrote", "write them")
        query = piece_of(score.query, join.axis, start, segment.axes)
        summed = tuple(a for axis in score.summed for a in (segment.axes if axis is join.axis else (axis,)))
        yield from _pieces(node, Score(query, segment.term, summed, score.scale), heads)
        start = start + segment.size
