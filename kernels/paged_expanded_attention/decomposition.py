"""Chunked MLA over pages as ATen operations that a graph can hold: a loop that gathers each chunk's latents."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...fp8 import FP8
from ..bundles import unchecked
from ..coded import bytes_of, dequantised, taken
from ..expanded_attention.decomposition import attend_in_loop
from ..loop import Operands, Positions
from ..pages import both
from .arguments import PagedExpandedAttention, zero


def attend_to_pages(x: PagedExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse, in a form that can be traced.

    The loop runs as many times as the longest sequence needs; keys and values exist as for `mla::expanded_attention`.
    Rope keys and scales of the whole table are gathered before the loop, because they may share memory with the
    latents, which inputs of a loop must not.
    """
    q, mask, starts, lengths, padding = x.q, x.mask, x.starts, x.seq_lens, x.padding
    dtype = torch.promote_types(q.dtype, torch.float32)
    page_size, capacity = x.pages.page_size, x.pages.capacity
    if x.causal:  # keys after the last query may hold anything
        lengths = torch.minimum(lengths, starts + x.counts).clamp_min(0)
    if padding is not None:
        q = q.masked_fill(padding[..., None, None], 0.0)
    in_use = torch.arange(x.block_table.shape[1], device=q.device) * page_size < lengths[:, None]
    table = x.block_table.masked_fill(~in_use, 0)
    rope = taken(x.rope_pages, lambda pages: pages[table].flatten(1, 2))
    scales = None
    if x.latent_scales is not None:
        scales = x.latent_scales.expand(*x.latent_pages.shape[:2], -1)[table].flatten(1, 2)
    if mask is not None and mask.dtype != torch.bool and mask.shape[3] != 1:
        positions = torch.arange(mask.shape[3], device=q.device)
        mask = both((positions < lengths[:, None])[:, None, None], mask)

    def load(chunk: Positions, cache: Operands) -> tuple[Tensor, Tensor]:
        pages, table, rope, scales = cache
        page = table.index_select(1, chunk.inside // page_size)
        latent, k_rope = pages[page, chunk.inside % page_size], rope.index_select(1, chunk.inside)
        latent = latent.view(FP8) if x.latent_pages.dtype == FP8 else latent
        own = None if scales is None else scales.index_select(1, chunk.inside)
        latent, k_rope = dequantised(latent, k_rope, own, dtype)
        return latent, k_rope[:, :, None]

    cache, offsets = (bytes_of(x.latent_pages), table, rope, scales), starts if x.causal else None
    result = attend_in_loop(replace(x, q=q, mask=mask), load, cache, offsets, capacity, lengths, padding)
    return zero(result, padding)


paged_expanded_attention_decomposition = unchecked(PagedExpandedAttention, attend_to_pages)
