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
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from ..algebra.sizes import Size, known_at_most, product, same, total
from ..algebra.terms import Axis, Dim, Join, Read, Term
from ..attention.attention import Attention
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .composed import composed
from .computed import computed
from .gated import ungated
from .groups import flat, groups_of, in_groups, with_latents
from .joined_factors import with_joined_factors
from .keys import told_apart
from .named_columns import with_named_columns
from .one_latent import in_one_latent
from .own_ropes import OF_HEADS, OF_QUERIES, SHARE, as_biases, own_of
from .readable import is_held, unbroadcast
from .scaled import with_scaled_queries
from .site import Groups, OwnLatent, Site
from .values import Values, readings
from .why_not import describe, name


def prove(attention: Attention, trace: Trace) -> Site:
    """The MLA site that an attention is.

    Raises:
        Refusal: if it is none, or that cannot be proved. It says what was expected, what was found, and where.
    """
    if not attention.keys:
        raise Refusal(attention.node, "expected several keys, found one: its value is the result")
    as_written, attention = attention, with_scaled_queries(attention, trace)
    found = _as_it_stands(attention, trace)
    if isinstance(found, Refusal):
        best = _otherwise(as_written, attention, trace)
    else:
        best = _with_fewer_ropes(found, attention, trace)
    grouped = best is not None and best.groups is not None and best.heads  # a head attends to the latent of its group
    if not grouped and (in_one := composed(attention)) is not None:
        with contextlib.suppress(Refusal):
            site = prove(in_one, trace)
            best = site if best is None or _narrower(site, best) else best
    if best is None:
        assert isinstance(found, Refusal)
        raise found
    return best


def _as_it_stands(attention: Attention, trace: Trace) -> Site | Refusal:
    """The narrowest site that an attention is by any reading of its values; if there is none, why not by the best."""
    best: Site | None = None
    refusals: list[Refusal] = []
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
    return refusals[0] if best is None else best


def _with_fewer_ropes(site: Site, attention: Attention, trace: Trace) -> Site:
    """A narrower site than one with rope keys of each head, if these come from latents beside that of the values."""
    in_one = in_one_latent(attention, of_keys=True) if site.own_ropes else None
    if in_one is None:
        return site
    found = _as_it_stands(in_one, trace)
    return found if isinstance(found, Site) and _narrower(found, site) else site


def _otherwise(as_written: Attention, attention: Attention, trace: Trace) -> Site | None:
    """The site of an attention that is none as it stands, by the first other reading of it that is one."""
    attempts = ((_as_written, as_written), *((reading, attention) for reading in _OTHER_READINGS))
    for reading, read in attempts:
        with contextlib.suppress(Refusal):
            if (site := reading(read, trace)) is not None:
                return site
    return None


def _as_written(attention: Attention, trace: Trace) -> Site | None:
    """Factors stay on the keys, as values that are the latent itself may have them too."""
    return _prove(attention, Values(attention.value, attention.columns, None), trace)


def _with_joined_factors(attention: Attention, trace: Trace) -> Site | None:
    """Latents or weights are joined instead of keys and values: first, as all other readings are of one product."""
    joined = with_joined_factors(attention)
    return None if joined is None else prove(joined, trace)


def _with_gated_latent(attention: Attention, trace: Trace) -> Site | None:
    """Factors of each key move to the latent: before sums, whose addends may have such factors."""
    multiplied = ungated(attention, trace)
    return None if multiplied is None else prove(multiplied, trace)


def _with_named_columns(attention: Attention, trace: Trace) -> Site | None:
    """Queries are put where an index takes columns of the keys from: first, as nothing is known of keys after that."""
    named = with_named_columns(attention, trace)
    return None if named is None else prove(named, trace)


def _with_latents_in_one(attention: Attention, trace: Trace) -> Site | None:
    """Several latents side by side are one of all heads: before groups, each of which is an attention of its own."""
    one = in_one_latent(attention)
    return None if one is None else prove(one, trace)


def _in_joined_groups(attention: Attention, trace: Trace) -> Site | None:
    """Keys or values are joined over groups of heads: before two latents, as a group may have both of its own."""
    split = in_groups(attention)
    return None if split is None else _of_groups(*split, trace)


def _with_two_latents(attention: Attention, trace: Trace) -> Site | None:
    """Keys have a latent and values another one."""
    return _prove(attention, next(readings(attention)), trace, apart=True)


def _in_groups_of_one_tensor(attention: Attention, trace: Trace) -> Site | None:
    """One tensor has the latents of all groups: last, as some heads of keys or of values alone make groups, too."""
    axes = with_latents(attention)
    return _of_groups(attention, axes, trace) if axes else None


_OTHER_READINGS = (
    _with_named_columns,
    _with_joined_factors,
    _with_gated_latent,
    _with_latents_in_one,
    _in_joined_groups,
    _with_two_latents,
    _in_groups_of_one_tensor,
)
"""Other readings of an attention, in the order in which they are tried. Each says why it stands where it does."""


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
    if site.of_keys is not None:
        keys.append(site.of_keys.latent.read.axes | {*site.of_keys.rank})
    groups = site.groups.axes if site.groups is not None else ()
    of_one = total(product(axis.size for axis in axes.difference(site.attention.keys)) for axes in keys)
    return product([of_one, *(axis.size for axis in groups)])


def _prove(attention: Attention, values: Values, trace: Trace, *, apart: bool = False) -> Site:
    """The site that an attention is if its values are these; if they are `apart`, from another latent than its keys."""
    node = attention.node
    if not math.isfinite(values.scale):
        raise Refusal(node, f"expected values with a finite scale, found {values.scale:g} times a product")
    values, told = told_apart(attention, values, trace, apart=apart)
    w_uk, nope, ropes, shifts = told.w_uk, told.nope, told.ropes, told.shifts
    latent, w_uv = values.latent, values.w_uv
    if nope.scale == 0 or not math.isfinite(nope.scale):
        raise Refusal(node, f"expected a scale of the scores that is finite and not 0, found {nope.scale:g}")
    heads = {axis for weight in (w_uk, w_uv) if weight is not None for axis in weight.axes}.intersection(attention.rows)
    if shared := tuple(axis for axis in attention.rows if axis in heads & latent.read.axes):
        return _of_groups(attention, shared, trace)
    ropes, of_queries = own_of(ropes, _of_queries(attention, latent.read, heads))
    if of_queries and apart:
        raise _differing_keys(node)
    ropes, own = own_of(ropes, heads)
    ropes = [replace(rope, key=unbroadcast(rope.key)) for rope in ropes]
    roles = _roles(attention, heads, [latent.read, *(rope.key.read for rope in ropes)])
    for rope in ropes:
        if not rope.key.axes <= {*roles.batch, *attention.keys, *rope.summed}:
            raise Refusal(node, f"expected rope columns shared by all heads, found {describe(rope.key, trace)}", SHARE)
    pieces = (list(map(computed, part)) for part in (ropes, own, of_queries, shifts))
    nope, ropes, own, of_queries, shifts = computed(nope), *pieces
    reads = [latent.read, w_uk, w_uv, nope.query.read, *values.biases]
    reads += [read for piece in (*ropes, *own, *of_queries, *shifts) for read in piece.reads]
    for read in reads:
        if read is not None and not is_held(read):
            raise Refusal(node, f"expected operands that are tensors of the graph, found a part of {name(read)}")
    if attention.shared and node.meta["val"].dtype == torch.float64:
        raise Refusal(node, "expected at most float32 for attention with sinks (scores without values), found float64")
    attention = as_biases(as_biases(attention, own, OF_HEADS, trace), of_queries, OF_QUERIES, trace)
    return Site(
        attention,
        batch=roles.batch,
        tokens=roles.tokens,
        heads=roles.heads,
        rank=values.rank,
        latent=latent,
        nope=nope,
        ropes=tuple(ropes),
        w_uk=w_uk,
        w_uv=w_uv,
        biases=values.biases,
        value_scale=values.scale,
        shifts=tuple(shifts) if attention.shared or attention.opaque else (),
        apart=apart,
        of_keys=None if told.own_latent is None else _readable(told.own_latent, {*roles.batch, *roles.tokens}),
        own_ropes=tuple(own),
    )


def _of_queries(attention: Attention, latent: Read, heads: set[Axis]) -> set[Axis]:
    """The rows that are queries: of a softmax by hand, all that neither the latent nor heads have, though these may be
    sequences that share a latent."""
    return {*(attention.rows if attention.queries is None else attention.queries)} - latent.axes - heads


class _Roles(NamedTuple):
    """The rows of an attention: those of what is cached, queries, and heads, among them heads of the queries alone."""

    batch: Dim
    tokens: Dim
    heads: Dim


def _roles(attention: Attention, heads: set[Axis], cached: Sequence[Read]) -> _Roles:
    """The roles of the rows, of which weights have `heads`, and what is `cached` has those of the batch."""
    rows = set(attention.rows)
    batch = {axis for read in cached for axis in read.axes} & rows
    tokens = set(attention.queries) if attention.queries is not None else rows - heads - batch
    if attention.queries is None and attention.masks and not heads:  # any row may be a head; heads share their masks
        tokens &= set[Axis]().union(*(mask.term.axes for mask in attention.masks))
    if tokens & (heads | batch):
        raise _differing_keys(attention.node)
    parts = batch, tokens, rows - batch - tokens
    return _Roles(*(tuple(axis for axis in attention.rows if axis in part) for part in parts))


def _differing_keys(node: fx.Node) -> Refusal:
    reason = "expected keys and values that are the same for every query, found some that differ"
    return Refusal(node, reason, "let every query attend to the same keys, and hide some of them from it by a mask")


def _readable(own: OwnLatent, rows: set[Axis]) -> OwnLatent | None:
    """The latent of the keys, if the graph holds all that is read of it, and its W_UK is the same for all `rows`."""
    own = replace(own, nope=computed(own.nope), ropes=tuple(map(computed, own.ropes)))
    reads = [own.latent.read, own.w_uk, own.nope.query.read, *(read for rope in own.ropes for read in rope.reads)]
    return own if own.w_uk.axes.isdisjoint(rows) and all(map(is_held, reads)) else None
