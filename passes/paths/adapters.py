"""Multiply latents and queries with weights that are made of others, with each of these by itself: weights that have
adapters beside them, `W + B A`, two maps in a row, `B A`, or weights side by side.

Few rows are multiplied with `W`, and with the matrices of the adapter one after the other. Where keys and values are
up-projected, the latent becomes `[latent, latent A]`, and the weight `[W, B]`. Neither forms the sum, in whose rounding
what the adapter adds could be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra.made import addends, matrices, side_by_side
from ..algebra.sizes import product
from ..algebra.substitution import change_read
from ..algebra.terms import Constant, Dim, Read
from ..code.reading import Reader, sum_of
from ..mla.site import Site
from .per_head import per_head


def times_weight(x: Tensor, weight: Read, heads: Dim, inner: Dim, outer: Dim, read: Reader) -> Tensor:
    """`x` `[B, Sq, N, I]` times a weight over `heads`, `inner` and `outer`, which is computed only if it is no sum or
    product of others."""
    if is_made_of_matrices(weight, inner, outer):
        return times_sum(x, addends(weight), heads, inner, outer, read)
    return per_head(x, read(weight, heads, inner, outer), weight)


def is_made_of_matrices(weight: Read, inner: Dim, outer: Dim) -> bool:
    """Whether a weight is a sum or a product of others, or several side by side: rows are multiplied with these."""
    several = any(len(side_by_side(weight, dim)) > 1 for dim in (inner, outer))
    return several or len(addends(weight)) > 1 or matrices(weight) is not None


def times_sum(x: Tensor, pieces: Sequence[Read], heads: Dim, inner: Dim, outer: Dim, read: Reader) -> Tensor:
    """`x` `[B, Sq, N, I]` times the sum of pieces over `heads`, `inner` and `outer`, in the dtype of `x`."""
    return sum_of([_times(x, piece, heads, inner, outer, read) for piece in pieces]).to(x.dtype)


def _times(x: Tensor, piece: Read, heads: Dim, inner: Dim, outer: Dim, read: Reader) -> Tensor:
    parts = side_by_side(piece, inner)
    if len(parts) > 1:
        widths = [read.realize(product(axis.size for axis in own)) for _, own in parts]
        pairs = zip(x.split(widths, dim=-1), parts, strict=True)
        return sum_of([_times(own, part, heads, along, outer, read) for own, (part, along) in pairs]).to(x.dtype)
    parts = side_by_side(piece, outer)
    if len(parts) > 1:
        return torch.cat([_times(x, part, heads, inner, along, read) for part, along in parts], dim=-1)
    if isinstance(piece.source, Constant) and piece.source.number == 0:
        return x.new_zeros([*x.shape[:-1], read.realize(product(axis.size for axis in outer))])
    made = _in_order(piece, inner)
    if made is not None and made[0].axes.isdisjoint(outer):
        first, second, rank = made
        return _times(_times(x, first, heads, inner, rank, read), second, heads, rank, outer, read)
    if piece.axes.isdisjoint(heads):
        return x @ read(piece, inner, outer).to(x.dtype)
    return per_head(x, read(piece, heads, inner, outer).to(x.dtype), piece)


def _in_order(piece: Read, inner: Dim) -> tuple[Read, Read, Dim] | None:
    """`first, second, rank` of a piece that is a product of two matrices, of which only the first has `inner`."""
    made = matrices(piece)
    if made is None:
        return None
    first, second, rank = made
    if first.axes.isdisjoint(inner):
        first, second = second, first
    return (first, second, rank) if second.axes.isdisjoint(inner) else None


@dataclass(frozen=True)
class Adapter:
    """What is added to both up-projections: `down` from the latent to `rank`, from which keys and values are made."""

    down: Read
    rank: Dim
    to_keys: Read
    to_values: Read


def adapters_of(w_uk: Read, w_uv: Read, latent: Dim) -> tuple[list[Adapter], list[Read], list[Read]]:
    """The adapters that two weights which are sums have in common, and the other summands of each weight."""
    adapters, of_keys, of_values = list[Adapter](), list[Read](), addends(w_uv)
    for piece in addends(w_uk):
        own = _in_order(piece, latent)
        alike = [(p, other) for p in of_values if own and (other := _in_order(p, latent)) and _start_alike(own, other)]
        if own is None or not alike:
            of_keys.append(piece)
            continue
        down, to_keys, rank = own
        twin, (_, to_values, its_rank) = alike[0]
        of_values.remove(twin)
        adapters.append(Adapter(down, rank, to_keys, change_read(to_values, dict(zip(its_rank, rank, strict=True)))))
    return adapters, of_keys, of_values


def _start_alike(a: tuple[Read, Read, Dim], b: tuple[Read, Read, Dim]) -> bool:
    """Whether the first matrices of two products are the same."""
    return len(a[2]) == len(b[2]) and change_read(b[0], dict(zip(b[2], a[2], strict=True))) == a[0]


def widened(x: Tensor, w_uk: Read, w_uv: Read, site: Site, read: Reader) -> tuple[Tensor, Tensor, Tensor] | None:
    """A latent `x` `[B, T, L]` and the two weights `[N, P, L]` and `[N, V, L]`, all wider by the ranks of the adapters.

    None if there are none.
    """
    adapters, *others = adapters_of(w_uk, w_uv, site.rank)
    if not adapters or not all(others):
        return None
    weights = []
    for dim, whole, ups in (
        (site.nope.summed, others[0], [a.to_keys for a in adapters]),
        (site.attention.columns, others[1], [a.to_values for a in adapters]),
    ):
        full = sum_of([read(piece, site.heads, dim, site.rank) for piece in whole])
        columns = [read(up, site.heads, dim, a.rank) for up, a in zip(ups, adapters, strict=True)]
        weights.append(torch.cat([part.to(x.dtype) for part in (full, *columns)], dim=-1))
    more = [x @ read(a.down, site.rank, a.rank).to(x.dtype) for a in adapters]
    return torch.cat([x, *more], dim=-1), weights[0], weights[1]
