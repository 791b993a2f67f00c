"""By heads: keys, values and scores of a group of heads at a time, which sees all of its keys at once.

Before   s = q (latent @ W_UK + k_rope)^T;  o = softmax(f(s)) (latent @ W_UV)      of all heads
After    for heads in groups:  the same for these heads, f included

This is for functions of scores, a soft cap for instance, through which chunks of keys could not be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mla_compile.cost import Cost, Dims, Named, attends_causally

from ..algebra.terms import Read
from ..attention.functions import Function
from ..caches.stored import StoredKeys
from ..code.loops import Attend, HeadDims, over_groups, untold_by
from ..code.reading import Reader, done, sources_of, wide, write_as
from ..masks.meaning import Meaning
from ..mla.apart import up_projected_apart
from ..mla.site import Site
from ..nodes.refusal import Refusal
from ..nodes.shapes import environment_of, hints_of
from ..nodes.source import where
from .carriers import Carrier
from .chunked import FORCE, Chunked, chunked_cost, refuse_apart, refuse_wide_latent
from .operands import largest_scale, scaled_alike
from .padding import padded
from .path import Part, Path

SCORES_BYTES = 1 << 28
"""The most bytes of scores in float32 at a time: 16 heads of 2,048 queries and keys. One head alone may have more.

A turn copies the output so far. With H of N heads at a time and as many queries as keys, that is
N V 8 / (H T 2 (P + R + V)) bytes for each FLOP: with DeepSeek-V3's dims and 4,096 tokens 0.01, a tenth of what a CPU
moves meanwhile, and less with more tokens.
"""


ByGroups = Callable[[Attend, Sequence[Tensor], HeadDims, Site, Tensor], Tensor]
"""Fills its last argument with attention of all heads."""


class ByHeads(Path):
    """What the code already does, for one group of heads after the other."""

    name = "by heads"
    why = "many queries meet many keys under a function of the scores, a group of heads at a time"
    expands = True

    @property
    def word(self) -> str:
        """That of the chunked path: it, too, expands a part of the keys and values at a time."""
        return Chunked.name

    def as_taken(self, site: Site) -> Site:
        """Keys that have a latent of their own come from that."""
        return up_projected_apart(site)

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites with up-projections whose scores are more than a sum, though it refuses some of them."""
        return site.attention.opaque is not None and site.up_projects_both

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse weights that something else reads, as they all have to exist, and functions of several scores."""
        opaque, remedy = site.attention.opaque, FORCE if self.may_be_asked else ""
        assert opaque is not None
        refuse_apart(site)
        refuse_reader(site)
        function = opaque.function
        if {piece.of for piece in (site.nope, *site.ropes)} != set(range(len(opaque.products))):
            function = "a product to which no part of the keys contributes"
        if isinstance(function, str):
            reason = f"expected a function of each score by itself for many queries, found {function}"
            raise Refusal(site.node, reason, remedy)
        if not isinstance(site.sizes["N"], int):
            raise Refusal(site.node, f"expected a constant number of heads, found {site.sizes['N']}", remedy)
        if not asked:
            refuse_wide_latent(site, may_be_asked=self.may_be_asked)

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """That of chunked attention: each head's keys and values are written and read."""
        return chunked_cost(dims, element_size, workspace_tokens, causal=attends_causally(named))

    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """All in the place of the product with the values."""
        return [Part(site.node, ByHeadsCode(site, self._by_groups))]

    def _by_groups(self, attend: Attend, tensors: Sequence[Tensor], dims: HeadDims, site: Site, out: Tensor) -> Tensor:
        """The output of all heads, by `attend`, which gets as many at a time as `SCORES_BYTES` allows."""
        group = heads_at_a_time(site, SCORES_BYTES)
        return attend(tensors) if group == site.sizes["N"] else over_groups(attend, tensors, dims, group, out)


class ByHeadsCode:
    """The torch code of a rewritten site, as a function of the tensors that it reads."""

    said = None

    def __init__(self, site: Site, by_groups: ByGroups) -> None:
        assert site.attention.opaque is not None
        assert isinstance(site.attention.opaque.function, Function)
        self.site, self.function, self.by_groups = site, site.attention.opaque.function, by_groups
        self.pieces = (site.nope, *site.ropes)
        self.dtypes = [dtype_of(product) for product in site.attention.opaque.products]
        self.second = site.second_latent
        reads = [site.latent.read, site.w_uk, site.w_uv, *site.biases]
        reads += [self.second.latent.read] if self.second is not None else []
        reads += [piece.query.read for piece in self.pieces] + [rope.key.read for rope in site.ropes]
        reads += [read for shift in site.shifts for read in shift.reads]
        reads += [term.read for term in self.function.operands]
        reads += [sink.term.read for sink in self.function.sinks]
        self.sources = sources_of(reads, site.node, site.attention.dims)

    def __call__(self, *values: Any) -> Tensor:
        site, read = self.site, Reader(self.sources, values)
        rows, keys = (site.batch, site.heads, site.tokens), site.attention.keys
        latent = read(site.latent.read, site.batch, keys, site.rank)
        second = [read(o.latent.read, site.batch, keys, o.rank) for o in (self.second,) if o is not None]
        below = (*second, latent)[0]
        rank = self.second.rank if self.second is not None else site.rank
        tensors: dict[str, Any] = {
            "queries": [self._queries(i, read) for i in range(len(self.dtypes))],
            "latent": latent,
            "second latent": second,
            # weights that are made of others come in float32
            "w_uk": [
                read(w, site.heads, site.nope.summed, rank).to(below.dtype) for w in (site.w_uk,) if w is not None
            ],
            "w_uv": [
                read(w, site.heads, site.attention.columns, site.rank).to(latent.dtype)
                for w in (site.w_uv,)
                if w is not None
            ],
            "ropes": [read(rope.key.read, site.batch, keys, rope.summed) for rope in site.ropes],
            "shifts": [
                (read(s.query.read, *rows, s.summed) * read(s.key.read, *rows, s.summed)).sum(-1, keepdim=True)
                for s in site.shifts
            ],
            "operands": [read(term.read, *rows, keys, broadcast=False) for term in self.function.operands],
            "sinks": [read(sink.term.read, *rows, sink.keys) for sink in self.function.sinks],
            "biases": [read(bias, *rows, site.attention.columns, broadcast=False) for bias in site.biases],
        }
        if untold := untold_by(pytree.tree_leaves(tensors)):  # an empty tensor's shape tells a loop of these sizes
            tensors["sizes"] = [tensors["latent"].new_empty((0, *map(read.realize, untold)), dtype=torch.bool)]
        o, columns = padded(self._of_all_heads(tensors), site, read.realize)
        return write_as(o, (*rows, columns), site.attention.dims, read.realize)

    def _queries(self, index: int, read: Reader) -> Tensor:
        """The queries of one product, `[B, N, Sq, D]`, side by side as its keys are, and in its largest scale."""
        site, own = self.site, [piece for piece in self.pieces if piece.of == index]
        queries = (read(piece.query.read, site.batch, site.heads, site.tokens, piece.summed) for piece in own)
        return side_by_side([q.to(self.dtypes[index]) for q in scaled_alike(own, queries)])

    def _of_all_heads(self, tensors: dict[str, Any]) -> Tensor:
        """`[B, N, Sq, V]`"""
        queries, columns = tensors["queries"][0], (*tensors["w_uv"], tensors["latent"].mT)[0].shape[1]
        leaves, spec = pytree.tree_flatten(tensors)
        places = pytree.tree_leaves({name: _head_dims(name, value) for name, value in tensors.items()})
        dims = [
            place if place >= 0 and leaf.shape[place] == queries.shape[1] else None
            for leaf, place in zip(leaves, places, strict=True)
        ]
        out = queries.new_zeros((*queries.shape[:3], columns), dtype=self.site.node.meta["val"].dtype)

        def attend(parts: Sequence[Tensor]) -> Tensor:
            return self._attend(pytree.tree_unflatten(parts, spec))

        return self.by_groups(attend, leaves, dims, self.site, out)

    def _attend(self, x: dict[str, Any]) -> Tensor:
        """`[B, H, Sq, V]` of a group of heads."""
        site, function = self.site, self.function
        assert site.attention.opaque is not None
        below = (*x["second latent"], x["latent"])[0]
        keys = [_up_projected(below, x["w_uk"]), *(rope[:, None] for rope in x["ropes"])]
        products = [self._product(i, queries, keys, x["shifts"]) for i, queries in enumerate(x["queries"])]
        scores = wide(function(products, x["operands"])) * function.factor
        taken = [sink.to(scores.dtype) * own.factor for sink, own in zip(x["sinks"], function.sinks, strict=True)]
        weights = torch.cat([scores, *taken], dim=-1) if taken else scores
        empty = scores.isneginf().all(-1, keepdim=True) if function.safe else None
        if empty is not None:
            weights = weights.masked_fill(empty, 0.0)  # gradients of such a row are 0 too
        weights = weights.softmax(-1).narrow(-1, 0, scores.shape[-1])
        if empty is not None:
            weights = weights.masked_fill(empty, 0.0)
        if function.numbers:
            weights = weights.masked_fill(weights.isnan(), 0.0)
        weights = done(weights.to(function.weights_dtype), site.attention.opaque.weights.then)
        o = weights @ _up_projected(x["latent"], x["w_uv"]).to(weights.dtype)
        o = o if site.value_scale == 1.0 else o * site.value_scale
        for bias in x["biases"]:
            o = o + bias * weights.sum(-1, keepdim=True)
        return o.to(site.node.meta["val"].dtype)

    def _product(self, index: int, queries: Tensor, keys: Sequence[Tensor], shifts: Sequence[Tensor]) -> Tensor:
        """One of the products of queries and keys, `[B, H, Sq, T]`, in the graph's dtype."""
        dtype, heads = queries.dtype, queries.shape[1]
        own = [key for piece, key in zip(self.pieces, keys, strict=True) if piece.of == index]
        columns = [(key if key.shape[1] == heads else key.expand(-1, heads, -1, -1)).to(dtype) for key in own]
        product = queries @ side_by_side(columns).mT
        scale = largest_scale([piece for piece in self.pieces if piece.of == index])
        product = product if scale == 1.0 else product * scale
        for shift, added in zip(self.site.shifts, shifts, strict=True):
            product = product + (added * shift.scale).to(dtype) if shift.of == index else product
        return product


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Tensors joined along the last dimension. A single one stays as it is: its join would have other strides when
    decomposed than when traced."""
    return columns[0] if len(columns) == 1 else torch.cat(list(columns), dim=-1)


def refuse_reader(site: Site) -> None:
    """Refuse weights that something else reads, as they have to exist."""
    assert site.attention.opaque is not None
    if site.attention.opaque.reader is not None:
        reason = (
            "expected attention weights that only the product with the values reads, found that "
            f"they are also read by {where(site.attention.opaque.reader)}"
        )
        raise Refusal(site.node, reason, "do not return them or use them again (transformers: output_attentions)")


def dtype_of(product: Read) -> torch.dtype:
    """The dtype of a product's tensor."""
    assert isinstance(product.source, fx.Node)
    dtype: torch.dtype = product.source.meta["val"].dtype
    return dtype


def heads_at_a_time(site: Site, scores_bytes: int) -> int:
    """The greatest divisor of the number of heads such that the scores of so many take at most `scores_bytes`; at least
    1."""
    sizes = site.sizes
    heads, environment = int(sizes["N"]), environment_of(site.node)
    of_one: Any = 4 * sizes["B"] * sizes["Sq"] * sizes["T"]
    if not isinstance(of_one, int):
        of_one = of_one.subs(hints_of((of_one,), environment)) if environment is not None else scores_bytes
    most = max(scores_bytes // int(of_one), 1)
    return max(count for count in range(1, heads + 1) if heads % count == 0 and count <= most)


def _up_projected(latent: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`[B, T, L]` times `[H, D, L]`: `[B, H, T, D]`; with no weight, as it was absorbed by hand, `[B, 1, T, L]`."""
    if not weights:
        return latent[:, None]
    (weight,) = weights
    return (latent @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2]).transpose(1, 2)


def _head_dims(name: str, value: Any) -> Any:
    """The dimension of heads of each tensor under a name, -1 where it has none."""
    dim = {"w_uk": 0, "w_uv": 0, "latent": -1, "second latent": -1, "ropes": -1, "sizes": -1}.get(name, 1)
    return pytree.tree_map(lambda _: dim, value)
