"""Absorbed attention around scores that are more than a sum of products: both products are regrouped, the rest stays.

Before   s = q (latent @ W_UK + k_rope)^T;    o = f(s) (latent @ W_UV)
After    s = (q @ W_UK) latent^T + q k_rope^T;  o = (f(s) latent) @ W_UV

f may be any function, a soft cap for instance: all that is used is that matrix products are associative.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.cost import Cost, Dims, Named, attends_causally

from ..caches.stored import StoredKeys
from ..code.reading import Reader, sources_of, write_as
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..nodes.refusal import Refusal
from .absorbed import Absorbed, absorbed_cost
from .adapters import times_weight
from .carriers import Carrier
from .padding import padded
from .path import Part, Path


class Opaque(Path):
    """Two products, regrouped in the graph; what is between them, masks included, stays as it is."""

    name = "opaque"
    why = Absorbed.why

    @property
    def word(self) -> str:
        """It is absorbed attention too."""
        return Absorbed.name

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose scores are more than a sum."""
        return site.attention.opaque is not None

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse code that is regrouped already."""
        if site.absorbed_by_hand:
            raise Refusal(
                site.node,
                "expected an up-projection of the keys to absorb, found scores that are absorbed by hand already",
            )

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """That of absorbed attention."""
        return absorbed_cost(dims, element_size, causal=attends_causally(named))

    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """One in the place of each product that has an up-projected factor."""
        products: list[int] = []
        if site.apart:
            products = sorted({rope.of for rope in site.ropes})
        elif site.w_uk is not None:
            products = [site.nope.of]
        scores = [ScoresCode(site, product) for product in products]
        parts = [Part(code.node, code) for code in scores]
        return parts if site.w_uv is None else [*parts, Part(site.node, OutputCode(site))]


class ScoresCode:
    """The torch code of product `index` of queries and keys, as a function of the tensors that it reads."""

    said = None

    def __init__(self, site: Site, index: int) -> None:
        assert site.attention.opaque is not None
        self.site = site
        self.ropes = [rope for rope in site.ropes if rope.of == index]
        self.shifts = [shift for shift in site.shifts if shift.of == index]
        product = site.attention.opaque.products[index]
        self.added = site.attention.opaque.added[index]
        assert isinstance(product.source, fx.Node)
        self.node = product.source
        reads = [] if site.apart else [site.latent.read, site.w_uk, site.nope.query.read]
        reads += [read for piece in (*self.ropes, *self.shifts) for read in piece.reads]
        reads += [term.read for term in self.added]
        self.dims = tuple(tuple(d.axis for d in digits if d.axis is not None) for digits in product.dims)
        self.sources = sources_of(reads, self.node, self.dims)

    def __call__(self, *values: Any) -> Tensor:
        site, read = self.site, Reader(self.sources, values)
        rows = site.batch, site.tokens, site.heads
        parts = [] if site.apart else [self._of_latents(read)]
        for rope in self.ropes:
            q_rope = read(rope.query.read, *rows, rope.summed)
            k_rope = read(rope.key.read, site.batch, site.attention.keys, rope.summed)
            parts.append(_per_key(q_rope, k_rope) * rope.scale)
        for shift in self.shifts:
            q, k = (read(what, *rows, shift.summed) for what in shift.reads)
            parts.append((q * k).sum(-1, keepdim=True) * shift.scale)
        parts += [read(term.read, *rows, site.attention.keys, broadcast=False) for term in self.added]
        scores = reduce(torch.add, parts)
        scores = write_as(scores, (*rows, site.attention.keys), self.dims, read.realize)
        return scores.to(self.node.meta["val"].dtype)

    def _of_latents(self, read: Reader) -> Tensor:
        """`[B, Sq, N, T]`: the part of the product whose keys are up-projected from the latent of the values."""
        site = self.site
        assert site.w_uk is not None
        latent = read(site.latent.read, site.batch, site.attention.keys, site.rank)
        q_nope = read(site.nope.query.read, site.batch, site.tokens, site.heads, site.nope.summed)
        q_latent = times_weight(q_nope, site.w_uk, site.heads, site.nope.summed, site.rank, read)
        return _per_key(q_latent, latent) * site.nope.scale


class OutputCode:
    """The torch code of the product of weights and values, as a function of the tensors that it reads."""

    said = None

    def __init__(self, site: Site) -> None:
        assert site.attention.opaque is not None
        self.site, self.weights = site, site.attention.opaque.weights
        reads = [self.weights, site.latent.read, site.w_uv, *site.biases]
        self.sources = sources_of(reads, site.node, site.attention.dims)

    def __call__(self, *values: Any) -> Tensor:
        site, read = self.site, Reader(self.sources, values)
        rows = site.batch, site.tokens, site.heads
        assert site.w_uv is not None

        weights = read(self.weights, *rows, site.attention.keys)
        latent = read(site.latent.read, site.batch, site.attention.keys, site.rank)
        sums = _per_key(weights, latent.transpose(1, 2))
        o = times_weight(sums, site.w_uv, site.heads, site.rank, site.attention.columns, read)
        o = o if site.value_scale == 1.0 else o * site.value_scale
        for bias in site.biases:
            o = o + read(bias, *rows, site.attention.columns) * weights.sum(-1, keepdim=True)
        o, columns = padded(o, site, read.realize)
        output = write_as(o, (*rows, columns), site.attention.dims, read.realize)
        return output.to(site.node.meta["val"].dtype)


def _per_key(rows: Tensor, keys: Tensor) -> Tensor:
    """`[B, Sq, N, D]` times `[B, T, D]`: `[B, Sq, N, T]`."""
    dtype = torch.promote_types(rows.dtype, keys.dtype)
    return (rows.flatten(1, 2).to(dtype) @ keys.transpose(1, 2).to(dtype)).unflatten(1, rows.shape[1:3])
