"""Paged absorbed MLA in C++ for the few rows of a decode step; what CPU tensors get.

The kernel of `latent_attention`, which reads keys where they are in the pages, FP8 ones too. Masks, float64, many rows,
pages whose last dim is not contiguous, and a machine without a C++ compiler go to `aten.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..latent_attention.cached import MOST_ROWS, Cached, attend, kernel_for
from .arguments import check_arguments
from .aten import paged_latent_attention_aten


def paged_latent_attention_cpu(
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
    """`mla::paged_latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    tensors = q_latent, q_rope, latent_pages, rope_pages, block_table, seq_lens
    check_arguments(*tensors, latent_scales, split_tokens, mask, first_positions)
    batch, query_count, heads, _ = q_latent.shape
    scales = None if latent_scales is None else latent_scales.expand(*latent_pages.shape[:2], -1)[None]
    table = block_table.to(torch.int64).contiguous()
    cached = Cached(latent_pages[None], rope_pages[None], scales, table, queries=max(batch, 1))
    kernel = None
    if mask is None and 0 < query_count * heads <= MOST_ROWS and batch and cached.readable():
        kernel = kernel_for(q_latent.dtype, latent_pages.dtype, rope_pages.dtype)
    if kernel is None:
        return paged_latent_attention_aten(*tensors, causal, scale, latent_scales, split_tokens, mask, first_positions)
    lengths, offsets = seq_lens.to(torch.int64), None
    if causal:
        offsets = lengths - query_count if first_positions is None else first_positions.to(torch.int64)
        offsets = offsets.contiguous()
        lengths = torch.minimum(lengths, offsets + query_count).clamp_(min=0)  # what is behind may be anything
    lengths = lengths.contiguous()
    q = q_latent.contiguous(), q_rope.contiguous()
    o = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)
    # How keys are shared out to the threads depends on all sequences of a call.
    for b in [slice(0, batch)] if split_tokens is None else [slice(b, b + 1) for b in range(batch)]:
        own = Cached(cached.latent, cached.k_rope, scales, table[b], cached.queries)
        of_own = lengths[b], None if offsets is None else offsets[b]
        attend(kernel, q[0][b], q[1][b], own, 0, None, scale, o[b], lse[b], *of_own)
    return o, lse


torch.library.impl("mla::paged_latent_attention", "CPU")(paged_latent_attention_cpu)
