"""Paged absorbed MLA as ATen operations that a graph can hold: gather all pages of the table, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from ..coded import dequantised, taken
from ..latent_attention.reference import latent_attention_reference
from .arguments import PagedLatentAttention


def gather_and_attend(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse, in a form that can be traced. Makes a copy of all keys of the table in at least float32."""
    dtype = torch.promote_types(x.q_latent.dtype, torch.float32)
    page_size, pages = x.latent_pages.shape[1], x.block_table.shape[1]
    queries = x.q_latent.shape[1]
    first, lengths = x.starts, x.seq_lens
    if x.causal:  # keys after the last query may hold anything
        lengths = torch.minimum(x.seq_lens, first + queries)
    in_use = torch.arange(pages, device=x.block_table.device) * page_size < lengths[:, None]
    table = x.block_table.masked_fill(~in_use, 0)
    positions = torch.arange(pages * page_size, device=x.block_table.device)
    parts = x.latent_pages, x.rope_pages
    latent, k_rope = (taken(part, lambda pages: pages[table].flatten(1, 2)) for part in parts)
    scales = None
    if x.latent_scales is not None:
        scales = x.latent_scales.expand(*x.latent_pages.shape[:2], -1)[table].flatten(1, 2)
    latent, k_rope = dequantised(latent, k_rope, scales, dtype)
    unused = (positions >= lengths[:, None])[..., None]
    latent, k_rope = (part.masked_fill(unused, 0.0) for part in (latent, k_rope))
    seen = (positions < lengths[:, None])[:, None, None]
    if x.causal:
        last = first[:, None] + torch.arange(queries, device=first.device)
        seen = seen & (positions <= last[..., None])[:, None]
    if x.mask is not None:
        own = x.mask if x.mask.shape[3] == 1 else x.mask.index_select(3, positions.clamp(max=x.mask.shape[3] - 1))
        seen = seen & own if own.dtype == torch.bool else own.to(dtype).masked_fill(~seen, -torch.inf)
    return latent_attention_reference(x.q_latent.to(dtype), x.q_rope.to(dtype), latent, k_rope, seen, None, x.scale)


paged_latent_attention_decomposition = unchecked(PagedLatentAttention, gather_and_attend)
