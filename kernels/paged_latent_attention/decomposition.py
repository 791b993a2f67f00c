"""Paged absorbed MLA as ATen operations that a graph can hold: the pages of a table are gathered, and attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8 import bytes_of, dequantised
from ..latent_attention.reference import latent_attention_reference


def paged_latent_attention_decomposition(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None = None,
    split_tokens: int | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_latent_attention`, to be traced; see `mla_compile.ops` for shapes and dtypes.

    A copy of all keys of the table exists, in at least float32.
    """
    dtype = torch.promote_types(q_latent.dtype, torch.float32)
    page_size, pages = latent_pages.shape[1], block_table.shape[1]
    queries = q_latent.shape[1]
    first, lengths = seq_lens - queries if first_positions is None else first_positions, seq_lens
    if causal:  # what is behind the last query may be anything
        lengths = torch.minimum(seq_lens, first + queries)
    in_use = torch.arange(pages, device=block_table.device) * page_size < lengths[:, None]
    table = block_table.masked_fill(~in_use, 0)
    positions = torch.arange(pages * page_size, device=block_table.device)
    latent, k_rope = (bytes_of(part)[table].flatten(1, 2) for part in (latent_pages, rope_pages))
    if latent_scales is None:
        latent, k_rope = latent.to(dtype), k_rope.to(dtype)
    else:
        scales = latent_scales.expand(*latent_pages.shape[:2], -1)[table].flatten(1, 2)
        latent, k_rope = dequantised(latent, k_rope, scales, dtype)
    unused = (positions >= lengths[:, None])[..., None]
    latent, k_rope = (part.masked_fill(unused, 0.0) for part in (latent, k_rope))
    seen = (positions < lengths[:, None])[:, None, None]
    if causal:
        last = first[:, None] + torch.arange(queries, device=first.device)
        seen = seen & (positions <= last[..., None])[:, None]
    if mask is not None:
        own = mask if mask.shape[3] == 1 else mask.index_select(3, positions.clamp(max=mask.shape[3] - 1))
        seen = seen & own if own.dtype == torch.bool else own.to(dtype).masked_fill(~seen, -torch.inf)
    return latent_attention_reference(q_latent.to(dtype), q_rope.to(dtype), latent, k_rope, seen, None, scale)
