"""Absorbed attention around scores that are more than a sum of products: both products regrouped, the rest kept.

Before   s = q (latent @ W_UK + k_rope)^T;    o = f(s) (latent @ W_UV)
After    s = (q @ W_UK) latent^T + q k_rope^T;  o = (f(s) latent) @ W_UV

Nothing is asked of f, a soft cap for instance: matrix products are associative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .axes import Dim, Read
from .materialize import read_as, realizer, sources_of, write_as
from .site import Site


class EmitScores:
    """The torch code of the product of queries and keys, as a function of the tensors that it reads."""

    def __init__(self, site: Site) -> None:
        assert site.attention.opaque is not None
        self.site = site
        self.ropes = [rope for rope in site.ropes if rope.of == site.nope.of]
        self.shifts = [shift for shift in site.shifts if shift.of == site.nope.of]
        self.product = site.attention.opaque.products[site.nope.of]
        reads = [site.latent, site.w_uk, site.nope.query.read]
        reads += [read for piece in (*self.ropes, *self.shifts) for read in (piece.query.read, piece.key.read)]
        self.dims = tuple(tuple(d.axis for d in digits if d.axis is not None) for digits in self.product.dims)
        self.sources = sources_of(reads, _node(self.product), self.dims)

    def __call__(self, *values: Any) -> Tensor:
        site, realize, place = self.site, realizer(values), dict(zip(self.sources, values, strict=True))
        rows = site.batch, site.tokens, site.heads
        assert site.w_uk is not None

        def read(what: Read, *layout: Dim) -> Tensor:
            return read_as(place[_node(what)], what, layout, realize, broadcast=True)

        latent = read(site.latent, site.batch, site.attention.keys, site.rank)
        q_nope = read(site.nope.query.read, *rows, site.nope.summed)
        w_uk = read(site.w_uk, site.heads, site.nope.summed, site.rank)
        scores = _per_key(torch.ops.mla.per_head_matmul(q_nope, w_uk), latent) * site.nope.scale
        for rope in self.ropes:
            q_rope = read(rope.query.read, *rows, rope.summed)
            k_rope = read(rope.key.read, site.batch, site.attention.keys, rope.summed)
            scores = scores + _per_key(q_rope, k_rope) * rope.scale
        for shift in self.shifts:
            q, k = (read(term.read, *rows, shift.summed) for term in (shift.query, shift.key))
            scores = scores + (q * k).sum(-1, keepdim=True) * shift.scale
        scores = write_as(scores, (*rows, site.attention.keys), self.dims, realize)
        return scores.to(_node(self.product).meta["val"].dtype)


class EmitOutput:
    """The torch code of the product of weights and values, as a function of the tensors that it reads."""

    def __init__(self, site: Site) -> None:
        assert site.attention.opaque is not None
        self.site, self.weights = site, site.attention.opaque.weights
        self.sources = sources_of([self.weights, site.latent, site.w_uv, *site.biases], site.node, site.attention.dims)

    def __call__(self, *values: Any) -> Tensor:
        site, realize, place = self.site, realizer(values), dict(zip(self.sources, values, strict=True))
        rows = site.batch, site.tokens, site.heads
        assert site.w_uv is not None

        def read(what: Read, *layout: Dim) -> Tensor:
            return read_as(place[_node(what)], what, layout, realize, broadcast=True)

        weights = read(self.weights, *rows, site.attention.keys)
        latent = read(site.latent, site.batch, site.attention.keys, site.rank)
        w_uv = read(site.w_uv, site.heads, site.attention.columns, site.rank)
        o = torch.ops.mla.per_head_matmul(_per_key(weights, latent.transpose(1, 2)), w_uv.transpose(1, 2))
        for bias in site.biases:
            o = o + read(bias, *rows, site.attention.columns) * weights.sum(-1, keepdim=True)
        output = write_as(o, (*rows, site.attention.columns), site.attention.dims, realize)
        return output.to(site.node.meta["val"].dtype)


def _per_key(rows: Tensor, keys: Tensor) -> Tensor:
    """`[B, Sq, N, D]` times `[B, T, D]`: `[B, Sq, N, T]`."""
    return (rows.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, rows.shape[1:3])


def _node(read: Read) -> Any:
    return read.source
