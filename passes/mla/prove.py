"""Prove that an attention is MLA: keys and values are an up-projection of one latent per token.

    key[b, n, t, :P]  = sum_l latent[b, t, l] W_UK[n, p, l]        the nope columns
    key[b, n, t, P:]  = k_rope[b, t, r]                            the rope columns, shared by all heads
    value[b, n, t, v] = sum_l latent[b, t, l] W_UV[n, v, l]

Keys and values may have biases that are the same for all keys. That of the keys adds the same to all scores of a row,
so it leaves the weights as they are; that of the values is added to the output.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..algebra.operations import alike, piece_of
from ..algebra.sizes import Size, known_at_most, product, same, total
from ..algebra.substitution import Slice, change_read, change_term
from ..algebra.terms import Axis, Dim, Join, Read, Sum, Term, Undefined, Zero
from ..attention.attention import Attention, Score
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .apart import own_latent, shared_by_heads
from .composed import composed
from .computed import computed
from .gated import ungated
from .groups import flat, groups_of, in_groups, with_latents
from .one_latent import in_one_latent
from .own_ropes import SHARE, as_biases, own_of
from .products import UpProjection, gathered, same_tensor, up_projection
from .readable import is_held, unbroadcast
from .scaled import with_scaled_queries, with_scaled_query
from .side_by_side import side_by_side
from .site import Groups, OwnLatent, Piece, Site
from .values import Values, readings
from .why_not import describe, name, no_up_projection, stored_expanded


def prove(attention: Attention, trace: Trace) -> Site:
    """The MLA site that an attention is.

    Raises:
        Refusal: if it is none, or that cannot be proved. It says what was expected, what was found, and where.
    """
    if not attention.keys:
        raise Refusal(attention.node, "expected several keys, found one: its value is the result")
    as_written, attention = attention, with_scaled_queries(attention, trace)
    refusals: list[Refusal] = []
    best = _as_it_stands(attention, trace, refusals)
    if best is None:
        best = _otherwise(as_written, attention, trace)
    elif best.own_ropes and (in_one := in_one_latent(attention, of_keys=True)) is not None:
        site = _as_it_stands(in_one, trace, [])
        best = site if site is not None and _narrower(site, best) else best
    if best is None or (best.groups is not None and not best.heads):  # no two heads share a latent
        with contextlib.suppress(Refusal):
            if (in_one := composed(attention)) is not None:
                site = prove(in_one, trace)
                best = site if best is None or _narrower(site, best) else best
    if best is None:
        raise refusals[0]
    return best


def _as_it_stands(attention: Attention, trace: Trace, refusals: list[Refusal]) -> Site | None:
    """The narrowest site that an attention is by any reading of its values; None, and why, if there is none."""
    best: Site | None = None
    for values in readings(attention):
        complete = best is not None and not best.own_ropes
        if complete and (values.w_uv is not None or values.opened or not _share_a_tensor(attention)):
            continue
        try:
            site = _prove(attention, values, trace)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        if best is None or _narrower(site, best):
            best = site
    return best


def _otherwise(as_written: Attention, attention: Attention, trace: Trace) -> Site | None:
    """The site of an attention that is none as it stands, with factors of its keys elsewhere, in groups, or with a
    latent for keys and one for values."""
    with contextlib.suppress(Refusal):
        return _prove(as_written, Values(as_written.value, as_written.columns, None), trace)
    with contextlib.suppress(Refusal):
        if (multiplied := ungated(attention, trace)) is not None:
            return prove(multiplied, trace)
    with contextlib.suppress(Refusal):
        if (one := in_one_latent(attention)) is not None:
            return prove(one, trace)
    with contextlib.suppress(Refusal):
        if (split := in_groups(attention)) is not None:
            return _of_groups(*split, trace)
    with contextlib.suppress(Refusal):
        return _prove(attention, next(readings(attention)), trace, apart=True)
    with contextlib.suppress(Refusal):
        if axes := with_latents(attention):
            return _of_groups(attention, axes, trace)
    return None


def _of_groups(attention: Attention, axes: Dim, trace: Trace) -> Site:
    """The site of an attention whose groups of heads, over `axes`, have a latent each."""
    axes, sites = flat(attention, axes, [prove(group, trace) for group in groups_of(attention, axes)])
    for rope in (rope for site in sites for rope in site.own_ropes):
        reason = f"expected rope columns shared by all heads of a group, found {describe(rope.key, trace)}"
        raise Refusal(attention.node, reason, SHARE)
    return replace(sites[0], groups=Groups(attention, axes, sites))


def _share_a_tensor(attention: Attention) -> bool:
    """Whether some columns of the keys may be the values: a latent that is itself a product has two readings."""

    def sources(term: Term) -> set[Hashable]:
        inner = term.parts.segments if isinstance(term.parts, Join) else ()
        return {term.read.source}.union(*(sources(segment.term) for segment in inner))

    return any(attention.value.read.source in sources(score.key) for score in attention.scores)


def _narrower(site: Site, best: Site) -> bool:
    """Whether a site has narrower latents than another, or no wider ones and does without groups. The other's may have
    any width if they mix tokens and this one's do not."""
    if _mixes_tokens(site) != _mixes_tokens(best):
        return _mixes_tokens(best)
    more = 0 if best.groups is not None and site.groups is None else 1
    return known_at_most(total([_width(site), more]), _width(best))


def _mixes_tokens(site: Site) -> bool:
    """Whether the latent has a column for each token and one weight for all heads: rather than a projection of each
    token, values are sums of what several tokens have, which are the latents then."""
    if site.absorbed_by_hand or site.key_heads or site.value_heads:
        return False
    return any(same(axis.size, key.size) for axis in site.rank for key in site.attention.keys)


def _width(site: Site) -> Size:
    """How many elements a key takes: of all latents, and of the rope keys that each head has for itself."""
    latent = site.latent.read.axes | {*site.rank}
    keys = [latent, *(rope.key.axes for rope in site.own_ropes)]
    groups = site.groups.axes if site.groups is not None else ()
    of_one = total(product(axis.size for axis in axes.difference(site.attention.keys)) for axes in keys)
    return product([of_one, *(axis.size for axis in groups)])


def _prove(attention: Attention, values: Values, trace: Trace, *, apart: bool = False) -> Site:
    """The site that an attention is if its values are these; if they are `apart`, from another latent than its keys."""
    node, keys, rows = attention.node, set(attention.keys), set(attention.rows)
    if not math.isfinite(values.scale):
        raise Refusal(node, f"expected values with a finite scale, found {values.scale:g} times a product")
    values, told = _told_apart(attention, values, trace, apart=apart)
    w_uk, nope, ropes, shifts = told.w_uk, told.nope, told.ropes, told.shifts
    latent, rank, w_uv, biases = values.latent, values.rank, values.w_uv, values.biases
    if nope.scale == 0 or not math.isfinite(nope.scale):
        raise Refusal(node, f"expected a scale of the scores that is finite and not 0, found {nope.scale:g}")
    heads = {axis for weight in (w_uk, w_uv) if weight is not None for axis in weight.axes} & rows
    if shared := tuple(axis for axis in attention.rows if axis in heads & latent.read.axes):
        return _of_groups(attention, shared, trace)
    ropes, own = own_of(ropes, heads)
    ropes = [replace(rope, key=unbroadcast(rope.key)) for rope in ropes]
    batch = {axis for read in (latent.read, *(rope.key.read for rope in ropes)) for axis in read.axes} & rows
    tokens = set(attention.queries) if attention.queries is not None else rows - heads - batch
    if attention.queries is None and attention.masks and not heads:  # any row may be a head; heads share their masks
        tokens &= set[Axis]().union(*(mask.term.axes for mask in attention.masks))
    if tokens & (heads | batch):
        reason = "expected keys and values that are the same for every query, found some that differ"
        raise Refusal(node, reason, "let every query attend to the same keys, and hide some of them from it by a mask")
    heads = rows - batch - tokens  # including heads of the queries alone, which share keys and values
    for rope in ropes:
        if not rope.key.axes <= batch | keys | set(rope.summed):
            raise Refusal(node, f"expected rope columns shared by all heads, found {describe(rope.key, trace)}", SHARE)
    nope, ropes, own, shifts = computed(nope), *(list(map(computed, part)) for part in (ropes, own, shifts))
    reads = [latent.read, w_uk, w_uv, nope.query.read, *biases]
    reads += [read for piece in (*ropes, *own, *shifts) for read in piece.reads]
    for read in reads:
        if read is not None and not is_held(read):
            raise Refusal(node, f"expected operands that are tensors of the graph, found a part of {name(read)}")
    if attention.shared and node.meta["val"].dtype == torch.float64:
        raise Refusal(node, "expected at most float32 for attention with sinks (scores without values), found float64")
    return Site(
        as_biases(attention, own, trace),
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
        value_scale=values.scale,
        shifts=tuple(shifts) if attention.shared or attention.opaque else (),
        apart=apart,
        of_keys=None if told.own_latent is None else _readable(told.own_latent, batch | tokens),
        own_ropes=tuple(own),
    )


def _readable(own: OwnLatent, rows: set[Axis]) -> OwnLatent | None:
    """The latent of the keys, if the graph holds all that is read of it, and its W_UK is the same for all `rows`."""
    own = replace(own, nope=computed(own.nope), ropes=tuple(map(computed, own.ropes)))
    reads = [own.latent.read, own.w_uk, own.nope.query.read, *(read for rope in own.ropes for read in rope.reads)]
    return own if own.w_uk.axes.isdisjoint(rows) and all(map(is_held, reads)) else None


@dataclass(frozen=True)
class _Keys:
    """The pieces of the keys: nope columns, which `w_uk` makes, rope keys, and what is the same for all keys.

    The last adds one number to all scores of a row, which a softmax does not see. If the keys have a latent of their
    own, all of them are ropes, and `own_latent` tells what they are up-projected from.
    """

    w_uk: Read | None
    nope: Piece
    ropes: list[Piece]
    shifts: list[Piece]
    own_latent: OwnLatent | None = None


def _told_apart(attention: Attention, values: Values, trace: Trace, *, apart: bool) -> tuple[Values, _Keys]:
    """The values over the axes of the nope columns, and the pieces of the keys."""
    node, keys = attention.node, set(attention.keys)
    latent, rank, w_uv = values.latent, values.rank, values.w_uv
    w_uk: Read | None = None
    nope: Piece | None = None
    ropes: list[Piece] = []
    shifts: list[Piece] = []
    weight_heads = set(w_uv.axes.intersection(attention.rows)) if w_uv else set[Axis]()
    pieces = [
        replace(part, of=i)
        for i, score in enumerate(attention.scores)
        for piece in _pieces(node, score, keys, weight_heads, values, trace)
        for part in _around(piece, latent.read, rank)
    ]
    for piece in side_by_side(attention, pieces, [_up_projected(piece, keys, latent, rank) for piece in pieces]):
        if piece.key.axes.isdisjoint(keys):
            shifts.append(piece)
            continue
        factors = _up_projected(piece, keys, latent, rank)
        if factors is None and not _absorbed(piece, latent, rank):
            ropes.append(piece)
            continue
        if nope is not None:
            raise Refusal(node, "expected one part of the keys to come from the latent of the values, found two")
        nope = piece
        if factors is not None:
            w_uk, summed = factors.weight, factors.rank
            nope = replace(piece, scale=piece.scale * factors.scale)
            latent = change_term(latent, dict(zip(rank, summed, strict=True)))
        else:
            latent, summed = piece.key, piece.summed
        w_uv = change_read(w_uv, dict(zip(rank, summed, strict=True))) if w_uv is not None else None
        rank = summed
    if nope is None and apart and w_uv is not None:
        found_apart = shared_by_heads(attention, ropes, weight_heads)
        if found_apart is not None:
            shared, same_for_all = found_apart
            of_keys = own_latent(attention, ropes, weight_heads)
            return values, _Keys(None, shared[0], shared, [*shifts, *same_for_all], of_keys)
    if nope is None or apart:
        found = values.latent.read if w_uv is not None else None
        raise stored_expanded(attention, trace) or no_up_projection(attention, [p.key for p in pieces], found, trace)
    return replace(values, latent=latent, rank=rank, w_uv=w_uv), _Keys(w_uk, nope, ropes, shifts)


def _up_projected(piece: Piece, keys: set[Axis], latent: Term, rank: Dim) -> UpProjection | None:
    """A piece of the keys as an up-projection of the latent of the values, if it is one."""
    factors = up_projection(piece.key, keys)
    if factors is None or not alike(factors.rank, rank):
        return None
    own = change_read(latent.read, dict(zip(rank, factors.rank, strict=True)))
    return factors if same_tensor(own, factors.latent.read) else None


def _absorbed(piece: Piece, value: Term, columns: Dim) -> bool:
    """Whether a piece of the keys is the value itself: attention in latent space, absorbed by hand."""
    if not alike(piece.summed, columns):
        return False
    return same_tensor(change_read(value.read, dict(zip(columns, piece.summed, strict=True))), piece.key.read)


def _around(piece: Piece, latent: Read, rank: Dim) -> Iterator[Piece]:
    """A piece of the keys, in up to three parts if a contiguous range of its columns is the latent."""
    start = _first_column(piece, latent, rank)
    if start is None:
        yield piece
        return
    ((column,), (own,)) = piece.summed, rank
    begin: Size = 0
    for size in (start, own.size, total([column.size, -own.size, -1 * start])):
        if not same(size, 0):
            axes = () if same(size, 1) else (Axis(size),)
            query, key = (piece_of(term, column, begin, axes) for term in (piece.query, piece.key))
            yield replace(piece, query=query, key=key, summed=axes)
        begin = total([begin, size])


def _first_column(piece: Piece, latent: Read, rank: Dim) -> Size | None:
    """Where the latent's columns begin in a piece of the keys that is wider than the latent; None if it has none."""
    if len(piece.summed) != 1 or len(rank) != 1 or same(piece.width, rank[0].size):
        return None
    ((column,), (own,)) = piece.summed, rank
    places = [
        [d.start for d in digits if d.axis is axis]
        for read, axis in ((piece.key.read, column), (latent, own))
        for digits in read.dims
        if any(d.axis is axis for d in digits)
    ]
    if [len(found) for found in places] != [1, 1]:
        return None
    start = total([places[1][0], -1 * places[0][0]])
    if not known_at_most(0, start) or not known_at_most(total([start, own.size]), column.size):
        return None
    part = change_read(piece.key.read, {column: Slice(own, start)})
    return start if same_tensor(part, latent) else None


def _pieces(
    node: fx.Node, score: Score, keys: set[Axis], heads: set[Axis], values: Values, trace: Trace, inner: bool = False
) -> Iterator[Piece]:
    """The pieces of a score's contraction.

    A join of columns is yielded piece by piece if some of them differ between heads, a sum term by term if the graph
    holds the terms. If values are `opened`, keys that were put together from plain tensors come piece by piece too,
    except those `inner` to a piece.
    """
    whole = Piece(score.query, score.key, score.summed, score.scale)
    if values.w_uv is None and _is_of_latent(whole, keys, values):
        yield whole
        return
    score = with_scaled_query(score, keys, trace)
    join, opened = score.key.parts, values.opened and not inner
    if opened and score.key.joined is not None and score.key.joined.axis in score.summed:
        then = score.key.read.then
        for query, term, axes in _along(score, score.key.joined):
            yield Piece(query, replace(term, read=replace(term.read, then=(*term.read.then, *then))), axes, score.scale)
        return
    if isinstance(join, Zero):
        return
    if isinstance(join, Sum):
        apart = [
            piece
            for term in gathered(join.terms, keys)
            for piece in _pieces(node, replace(score, key=term), keys, heads, values, trace, inner)
        ]
        held = all(is_held(piece.key.read) or _is_of_latent(piece, keys, values) for piece in apart)
        if held or not is_held(score.key.read):
            yield from apart
            return
    shared = heads and not score.key.axes & heads and not opened
    if not isinstance(join, Join) or join.axis not in score.summed or shared:
        yield Piece(score.query, score.key, score.summed, score.scale)
        return
    for query, term, axes in _along(score, join):
        if isinstance(term.parts, Undefined):
            raise Refusal(
                node,
                "expected keys all of whose columns are written, found some that never are",
                "write all columns of the keys",
            )
        yield from _pieces(node, Score(query, term, axes, score.scale), keys, heads, values, trace, inner=True)


def _is_of_latent(piece: Piece, keys: set[Axis], values: Values) -> bool:
    latent, rank = values.latent, values.rank
    return _up_projected(piece, keys, latent, rank) is not None or _absorbed(piece, latent, rank)


def _along(score: Score, join: Join) -> Iterator[tuple[Term, Term, Dim]]:
    """The query, the key and the summed axes of each piece of a join of keys."""
    start: Size = 0
    for segment in join.segments:
        summed = tuple(a for axis in score.summed for a in (segment.axes if axis is join.axis else (axis,)))
        yield piece_of(score.query, join.axis, start, segment.axes), segment.term, summed
        start = start + segment.size
