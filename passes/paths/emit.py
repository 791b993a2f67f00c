"""The torch code that a site becomes.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, o = softmax(q k^T) v
After    absorbed   o = latent_attention(q_nope @ W_UK, q_rope, latent, k_rope) @ W_UV
                    o = paged_latent_attention(q_nope @ W_UK, q_rope, pages, block_table) @ W_UV, of pages
         chunked    o = expanded_attention(q, latent, k_rope, W_UK, W_UV)
                    o = paged_expanded_attention(q, pages, block_table, W_UK, W_UV), of pages
         sparse     o = sparse_latent_attention(q_nope @ W_UK, q_rope, latent, k_rope, indices) @ W_UV
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from mla_compile.fp8 import FP8

from ..algebra.sizes import Unaligned, product, same
from ..caches.fp8 import Fp8Keys
from ..caches.pages import Pages
from ..code.reading import Reader, sources_of, write_as
from ..masks.bounds import Bounds
from ..masks.dense import Dense
from ..masks.meaning import Meaning
from ..masks.named_keys import NamedKeys
from ..mla.site import Site
from .per_head import per_head


class Emit:
    """The torch code of a rewritten site, as a function of the tensors that it reads.

    With `kept` it reads the site's keys as they are there.
    """

    def __init__(
        self, site: Site, meaning: Meaning, path: str, workspace_tokens: int, kept: Pages | Fp8Keys | None
    ) -> None:
        self.site, self.path, self.workspace_tokens, self.kept = site, path, workspace_tokens, kept
        self.pages = pages = kept if isinstance(kept, Pages) else None
        bounds = Bounds.of(site, meaning)
        self.dense_lengths = kept is None and _has_lengths(site, bounds, path)
        paged = self.dense_lengths or (pages is not None and path != "sparse")
        self.kind = "paged" if paged else path
        named = NamedKeys.of(site, meaning) if path == "sparse" else None
        self.seen = named or (bounds if paged else None) or Dense.of(site, meaning)
        keys = [site.latent, *(rope.key.read for rope in site.ropes)]
        reads = [*(keys if kept is None else kept.reads), site.w_uk, site.w_uv, site.nope.query.read, *site.biases]
        reads += [rope.query.read for rope in site.ropes]
        reads += [read for shift in site.shifts for read in (shift.query.read, shift.key.read)]
        reads += self.seen.reads
        reads += [sink.term.read for sink in site.attention.sinks]
        sizes = [site.sizes["T"], site.sizes["Sq"]] if paged or pages is not None else []
        more = set[sympy.Symbol]().union(*(sympy.sympify(size).free_symbols for size in sizes))
        self.sources = sources_of(reads, site.node, site.attention.dims, {*self.seen.symbols, *more})

    def __call__(self, *values: Any) -> Tensor:
        site = self.site
        read = Reader(self.sources, values)
        realize = read.realize
        keys, columns = site.attention.keys, site.attention.columns
        rows = site.batch, site.tokens, site.heads
        q_nope = read(site.nope.query.read, *rows, site.nope.summed)
        q_rope = self._ropes(
            [
                read(r.query.read, *rows, r.summed) * (r.scale / site.nope.scale)
                if r.scale != site.nope.scale
                else read(r.query.read, *rows, r.summed)
                for r in site.ropes
            ],
            q_nope,
        )
        scales: Tensor | None = None
        if self.kept is None:
            latent = read(site.latent, site.batch, keys, site.rank)
            k_rope = self._ropes([read(r.key.read, site.batch, keys, r.summed) for r in site.ropes], latent)
        else:
            layout, rope = self.kept.layout, self.kept.rope
            latent = read(self.kept.latent, *layout, site.rank)
            scales = _scales(read, self.kept, latent)
            parts = [] if rope is None else [read(rope, *layout, site.ropes[0].summed)]
            k_rope = self._ropes(parts, latent, q_nope.dtype)
        operands = [q_nope, q_rope, latent, k_rope]
        dtype = _together([t for t in operands if scales is None or t.dtype != FP8])
        if self.pages is not None and any(t.dtype not in (dtype, FP8) for t in (latent, k_rope)):
            raise Unaligned(f"{dtype} queries meet pages of {latent.dtype} and {k_rope.dtype}")
        q_nope, q_rope, latent, k_rope = (t if t.dtype == FP8 else t.to(dtype) for t in operands)
        seen, offset = None, None
        if self.pages is None and not self.dense_lengths:
            assert not isinstance(self.seen, Bounds)
            seen, offset = self.seen.indices(read) if isinstance(self.seen, NamedKeys) else self.seen.mask(read)
        scale = site.nope.scale
        w_uk = None if site.w_uk is None else read(site.w_uk, site.heads, site.nope.summed, site.rank).to(dtype)
        w_uv = None if site.w_uv is None else read(site.w_uv, site.heads, columns, site.rank).to(dtype)
        if self.path == "chunked":
            assert w_uk is not None
            assert w_uv is not None
            q = torch.cat([q_nope, q_rope], dim=-1) if q_rope.shape[-1] else q_nope
            if self.kind == "paged":
                o, lse = self._chunks_of_pages(read, (q, latent, k_rope), (w_uk, w_uv), scales)
            else:
                o, lse = torch.ops.mla.expanded_attention(
                    q, latent, k_rope, w_uk, w_uv, seen, offset, scale, self.workspace_tokens
                )
        else:
            q_latent = q_nope if w_uk is None else per_head(q_nope, w_uk, site.w_uk)
            if self.pages is not None or self.dense_lengths:
                o, lse = self._over_pages(read, (q_latent, q_rope, latent, k_rope), scales)
            elif isinstance(self.seen, NamedKeys):
                uniform = self.seen.uniform_when_empty
                o, lse = torch.ops.mla.sparse_latent_attention(
                    q_latent, q_rope, latent, k_rope, seen, None, offset, scale, uniform, scales
                )
            else:
                o, lse = torch.ops.mla.latent_attention(q_latent, q_rope, latent, k_rope, seen, offset, scale)
            if w_uv is not None:
                o = per_head(o, w_uv.transpose(1, 2), site.w_uv)
        empty = lse.isneginf().unsqueeze(-1) if self.seen.may_be_empty else None
        for bias in site.biases:
            addend = read(bias, *rows, columns)
            o = o + (addend if empty is None else torch.where(empty, 0, addend))
        if site.attention.sinks:
            o = self._share(read, o, lse)
        elif site.attention.strict_rows and empty is not None:
            o = torch.where(empty, math.nan, o)
        output = write_as(o, (*rows, columns), site.attention.dims, realize)
        return output.to(site.node.meta["val"].dtype)

    def _over_pages(
        self, read: Reader, operands: tuple[Tensor, Tensor, Tensor, Tensor], scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q_latent, q_rope, latent, k_rope = operands
        scale = self.site.nope.scale
        table = self._table(read, latent)
        o: Tensor
        lse: Tensor
        if isinstance(self.seen, NamedKeys):  # every query for itself, over the rows of the whole pool as one sequence
            indices = self.seen.slots(read, table, latent.shape[1])
            queries = (q.flatten(0, 1).unsqueeze(0) for q in (q_latent, q_rope))
            keys = (pool.flatten(0, 1).unsqueeze(0) for pool in (latent, k_rope))
            scales = None if scales is None else scales.flatten(0, 1).unsqueeze(0)
            o, lse = torch.ops.mla.sparse_latent_attention(
                *queries, *keys, indices.flatten(0, 1).unsqueeze(0), None, None, scale, False, scales
            )
            return o.view(*q_latent.shape), lse.view(*q_latent.shape[:3])
        mask, causal, lengths, positions = self.seen.in_pages(read, table)
        o, lse = torch.ops.mla.paged_latent_attention(
            *operands, table, lengths, causal, scale, scales, mask=mask, first_positions=positions
        )
        return o, lse

    def _chunks_of_pages(
        self,
        read: Reader,
        operands: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, latent, k_rope = operands
        table = self._table(read, latent)
        if self.pages is not None:
            rows, keys = self.pages.row, self.site.sizes["T"]
            if not same(product([self.pages.page.size, 1 if rows is None else rows.size]), keys):
                # Chunks are laid over the whole of a table. An index and no slice, which would be guarded on its size.
                count: Any = read.realize(keys)
                count = (count + latent.shape[1] - 1) // latent.shape[1]
                table = table.index_select(1, torch.arange(count, device=table.device))
        assert not isinstance(self.seen, NamedKeys)
        mask, causal, lengths, positions = self.seen.in_pages(read, table)
        o: Tensor
        lse: Tensor
        o, lse = torch.ops.mla.paged_expanded_attention(
            *(q, latent, k_rope, table, lengths, *weights, causal, self.site.nope.scale, self.workspace_tokens),
            latent_scales=scales,
            mask=mask,
            first_positions=positions,
        )
        return o, lse

    def _table(self, read: Reader, latent: Tensor) -> Tensor:
        """`[B, max_pages]`; of a dense cache each sequence is one page."""
        pages = self.pages
        if pages is None:
            return torch.arange(latent.shape[0], device=latent.device).unsqueeze(1)
        table: Tensor = read(pages.table, self.site.batch, (pages.page,))
        if pages.wraps:  # a naive read counts negative pages from the end
            table = torch.where(table < 0, table + latent.shape[0], table)
        return table

    def _ropes(self, parts: list[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if not parts:
            return like.new_empty([*like.shape[:-1], 0], dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _share(self, read: Callable[..., Tensor], o: Tensor, lse: Tensor) -> Tensor:
        """The output where sinks take part in the softmax: `o exp(lse) / (exp(lse) + exp(sinks))`.

        NaN where nothing takes part at all, keys or sinks, as in a plain softmax.
        """
        site = self.site
        rows = site.batch, site.tokens, site.heads
        taken = None
        for sink in site.attention.sinks:
            scores = read(sink.term.read, *rows, sink.keys).to(lse.dtype) * sink.factor
            taken = scores.logsumexp(-1) if taken is None else torch.logaddexp(taken, scores.logsumexp(-1))
        assert taken is not None
        for shift in site.shifts:
            q, k = (read(term.read, *rows, shift.summed).to(lse.dtype) for term in (shift.query, shift.key))
            lse = lse + (q * k).sum(-1) * shift.scale
        return o * torch.sigmoid(lse - taken).unsqueeze(-1).to(o.dtype)


_LOOK_AT_MASKS = {"cpu"}
"""Devices whose kernels see in a mask which keys there are, and touch no others."""


def _has_lengths(site: Site, bounds: Bounds | None, path: str) -> bool:
    """Whether a dense cache is better taken for pages, one a sequence: up to lengths that the device knows.

    A static cache under CUDA graphs: a mask over all that it has room for would be all that is known of its keys. A
    batch of unequal prompts: no chunk needs a mask, and none is attended to by those that it lies behind (on CPU, where
    a mask's values are looked at, 1,024 tokens take 13 % less time under lengths, 28 % under lengths and causal).
    """
    device = site.node.meta["val"].device.type
    better = path == "chunked" or (path == "absorbed" and device not in _LOOK_AT_MASKS)
    return better and bounds is not None and bool(bounds.reads)


def _scales(read: Reader, kept: Pages | Fp8Keys, latent: Tensor) -> Tensor | None:
    """The scales of latents in FP8, float32, with a size of 1 for what shares them."""
    if kept.factor is None:
        return None
    if kept.scales is None:
        return latent.new_full((1, 1, 1), kept.factor, dtype=torch.float32)
    scales: Tensor = read(kept.scales, *kept.layout, kept.groups, broadcast=False).float()
    return scales if kept.factor == 1.0 else scales * kept.factor


def _together(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
