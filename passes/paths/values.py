"""Values alone: keys and their scores stay what the graph computes, and values are up-projected after their sum.

Before   v = latent @ W_UV;  o = softmax(q k^T) v
After    o = (softmax(q k^T) latent) @ W_UV

With values, a token takes `L V` multiply-adds for each head that has values, and `V` for each query and head. Without
them it takes `L` for each query and head, and each of these takes `L V` once: much less if queries are few. But all
scores have to exist, of which SDPA holds only a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, ClassVar

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor

from mla_compile.cost import Cost, Device, Dims, Named, Size, cost_of, decide, times_of

from ..algebra.sizes import known_at_most, product
from ..algebra.terms import Axis
from ..attention.attention import Score
from ..caches.stored import StoredKeys
from ..code.reading import Reader, sources_of, wide, write_as
from ..masks.meaning import Meaning
from ..mla.kept_columns import KeptColumns
from ..mla.site import Site
from .carriers import Carrier, MaskAndOffset
from .one_op import finished
from .opaque import OutputCode
from .path import Part, Path
from .per_head import per_head


class ValuesAlone(Path):
    """A sum of latents for each query and head, up-projected."""

    name = "values"
    why = "few queries meet many keys"
    carriers: ClassVar[tuple[type[Carrier], ...]] = (MaskAndOffset,)
    of_values_alone = True

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """All sites whose keys stay."""
        return True

    def competes(self, dims: Dims, named: Named | None) -> bool:
        """Never: the sites that it takes have no other path. `pays` says what it saves."""
        return False

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """The cost if keys were up-projected from the latent, for each head."""
        d = dims
        own, width = _absorbed(d, d.N, element_size), d.P + d.R
        multiply_adds = d.B * d.N * (d.T * d.L * d.P + d.Sq * d.T * width)
        keys = cost_of(multiply_adds, d.N * d.L * d.P + d.query + 2 * d.B * d.N * d.T * width, element_size)
        return Cost(own.flops + keys.flops, own.bytes + keys.bytes)

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Never: it reads one tensor of all latents, which the keys are made of anyway."""
        return False

    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """What is kept of a product, and the rest in the place of the attention, or of its product with the values if
        scores are more than a sum."""
        kept = [] if site.kept is None else [Part(site.kept.place, KeptCode(site.kept))]
        if site.attention.opaque is not None:
            return [*kept, Part(site.node, OutputCode(site))]
        assert isinstance(mask, MaskAndOffset)
        return [*kept, Part(site.node, ValuesCode(site, mask))]


@dataclass(frozen=True)
class Saving:
    """The conditions under which values are better up-projected after their sum, without those that always hold."""

    room: tuple[Relational, ...]
    """That the scores, which have to exist, take no more room than the values."""
    time: tuple[Relational, ...]
    """That it takes less time by the roofline."""

    @property
    def conditions(self) -> tuple[Relational, ...]:
        """All of them."""
        return *self.time, *self.room


def pays(site: Site, device: Device, hints: Mapping[sympy.Symbol, int]) -> Saving | None:
    """When values are better up-projected after their sum, if that is so at the hints; else None."""
    sizes = site.sizes
    if known_at_most(sizes["T"], sizes["Sq"]):  # no context: there are no fewer sums than tokens
        return None
    heads = product(axis.size for axis in site.value_heads)
    return _pays(Dims(**sizes), heads, site.node.meta["val"].element_size(), device, tuple(hints.items()))


@lru_cache(maxsize=256)
def _pays(
    dims: Dims, value_heads: Size, element_size: int, device: Device, known: tuple[tuple[sympy.Symbol, int], ...]
) -> Saving | None:
    hints = dict(known)
    room = sympy.Ge(sympy.sympify(value_heads * dims.V), sympy.sympify(dims.N * dims.Sq))
    if room.subs(hints) != sympy.true:
        return None
    costs = {
        "as written": _as_written(dims, value_heads, element_size),
        ValuesAlone.name: _absorbed(dims, value_heads, element_size),
    }
    decision = decide({name: times_of(cost, device) for name, cost in costs.items()}, hints)
    if decision.path != ValuesAlone.name:
        return None
    return Saving(() if room == sympy.true else (room,), tuple(c for c in decision.conditions if c != sympy.true))


def _absorbed(dims: Dims, value_heads: Size, element_size: int) -> Cost:
    """The cost of what follows the scores. Scores, and the weights made of them, are written and read once each."""
    d = dims
    scores = 4 * d.B * d.N * d.Sq * d.T
    elements = value_heads * d.L * d.V + d.B * d.T * d.L + 4 * d.B * d.Sq * d.N * d.L + d.output + scores
    return cost_of(d.B * d.N * d.Sq * d.L * (d.T + d.V), elements, element_size)


def _as_written(dims: Dims, value_heads: Size, element_size: int) -> Cost:
    """The cost of values that are written, and of what SDPA does with them."""
    d = dims
    elements = value_heads * d.L * d.V + d.B * d.T * d.L + d.output + 2 * d.B * d.T * value_heads * d.V
    return cost_of(d.B * (value_heads * d.T * d.L * d.V + d.N * d.Sq * d.T * d.V), elements, element_size)


class KeptCode:
    """The torch code of the columns of a product that are not values, as a function of the product's factors."""

    said = None

    def __init__(self, kept: KeptColumns) -> None:
        self.kept, self.dtype = kept, kept.place.meta["val"].dtype
        reads = [kept.parts.left.read, kept.parts.right.read, *kept.biases]
        self.sources = sources_of(reads, kept.place, kept.dims)

    def __call__(self, *values: Any) -> Tensor:
        read, parts, dims = Reader(self.sources, values), self.kept.parts, self.kept.dims
        axes = [axis for dim in dims for axis in dim]
        rows, columns = (tuple(a for a in axes if a in side.axes) for side in (parts.left, parts.right))
        left, right = read(parts.left.read, rows, parts.summed), read(parts.right.read, columns, parts.summed).mT
        if self.kept.biases:
            bias = reduce(torch.add, (read(bias, rows, columns, broadcast=False) for bias in self.kept.biases))
            dtype = torch.promote_types(left.dtype, bias.dtype)
            product = torch.addmm(bias.to(dtype), left.to(dtype), right.to(dtype), alpha=parts.scale)
        else:
            product = left @ right if parts.scale == 1.0 else (left @ right) * parts.scale
        return write_as(product, (rows, columns), dims, read.realize).to(self.dtype)


class ValuesCode:
    """The torch code of a rewritten site, as a function of the tensors that it reads."""

    def __init__(self, site: Site, carrier: MaskAndOffset) -> None:
        self.site, self.carrier = site, carrier
        reads = [site.latent.read, site.w_uv, *site.biases, *carrier.reads]
        reads += [read for score in site.attention.scores for read in (score.query.read, score.key.read)]
        reads += [sink.term.read for sink in site.attention.sinks]
        self.sources = sources_of(reads, site.node, site.attention.dims, carrier.symbols)

    @property
    def said(self) -> object:
        """The masks, and what the sites of other paths have as their keys and pieces: the latent and the scores."""
        scores = [(s.query.read, s.key.read, s.summed, s.scale) for s in self.site.attention.scores]
        return ValuesAlone.name, self.carrier.said, self.site.latent.read, self.site.value_heads, scores

    def __call__(self, *values: Any) -> Tensor:
        site, read = self.site, Reader(self.sources, values)
        rows, keys = (site.batch, site.heads, site.tokens), site.attention.keys
        scores = reduce(torch.add, (self._product(score, read) for score in site.attention.scores))
        scores = _masked(scores, *self.carrier.emit(read))
        lse = scores.logsumexp(-1).transpose(1, 2)
        weights = scores.softmax(-1)
        if self.carrier.may_be_empty:
            weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, weights)
        latent = wide(read(site.latent.read, site.batch, keys, site.rank))
        sums = (weights.flatten(1, 2) @ latent.to(weights.dtype)).unflatten(1, weights.shape[1:3])
        own, others = self._heads({*site.value_heads})
        folded = site.batch, (*others, *site.tokens), own
        assert site.w_uv is not None
        w_uv = read(site.w_uv, own, site.rank, site.attention.columns)
        sums = write_as(sums, (*rows, site.rank), (*folded, site.rank), read.realize)
        o = per_head(sums.to(w_uv.dtype), w_uv, site.w_uv)
        output = (site.batch, site.tokens, site.heads), site.attention.columns
        o = write_as(o, (*folded, site.attention.columns), (*output[0], output[1]), read.realize)
        return finished(site, self.carrier, read, o, lse)

    def _product(self, score: Score, read: Reader) -> Tensor:
        """A summand of the scores, `[B, N, Sq, T]`. Heads that share keys count as further queries to them."""
        site = self.site
        own, others = self._heads(score.key.axes)
        folded = site.batch, own, (*others, *site.tokens)
        q = read(score.query.read, *folded, score.summed)
        k = read(score.key.read, site.batch, own, site.attention.keys, score.summed)
        dtype = torch.promote_types(wide(q).dtype, k.dtype)
        scores = (q.to(dtype) @ k.to(dtype).mT) * score.scale
        layout = (site.batch, site.heads, site.tokens, site.attention.keys)
        return write_as(scores, (*folded, site.attention.keys), layout, read.realize)

    def _heads(self, axes: set[Axis] | frozenset[Axis]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The heads among some axes, and the others."""
        heads = self.site.heads
        return tuple(a for a in heads if a in axes), tuple(a for a in heads if a not in axes)


def _masked(scores: Tensor, mask: Tensor | None, offset: int | torch.SymInt | None) -> Tensor:
    """Scores, without those that a mask or a causal limit hides: query i sees keys up to `i + offset`."""
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if offset is not None:
        queries, keys = (torch.arange(count, device=scores.device) for count in scores.shape[-2:])
        later: Any = offset  # int or SymInt
        scores = scores.masked_fill(keys > queries[:, None] + later, float("-inf"))
    return scores
