"""Paged absorbed MLA in C++ for the few rows of a decode step: the implementation for CPU tensors.

In compiled graphs `dispatcher/paged_latent_attention.h` does the same without this Python code, under masks too.

This is the kernel of `latent_attention`, which reads keys in place from the pages, also in FP8 and INT8. Here masks,
float64, many rows, pages whose last dim is not contiguous, and a machine without a C++ compiler go to `aten.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked
from ..dispatcher import general
from ..latent_attention.cached import KERNELS, MOST_ROWS, Cached, attend
from .arguments import PagedLatentAttention
from .aten import attend as attend_with_aten


def attend_on_cpu(operands: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """o `[B, Sq, N, L]` and lse `[B, Sq, N]`."""
    q_latent, q_rope, latent_pages = operands.q_latent, operands.q_rope, operands.latent_pages
    rope_pages, block_table, seq_lens = operands.rope_pages, operands.block_table, operands.seq_lens
    latent_scales, first_positions = operands.latent_scales, operands.first_positions
    batch, query_count, heads, _ = q_latent.shape
    scales = None if latent_scales is None else latent_scales.expand(*latent_pages.shape[:2], -1)[None]
    table = block_table.to(torch.int64).contiguous()
    cached = Cached(latent_pages[None], rope_pages[None], scales, table, queries=max(batch, 1))
    kernel = None
    if operands.mask is None and 0 < query_count * heads <= MOST_ROWS and batch and cached.readable():
        kernel = KERNELS.of(q_latent.dtype, latent_pages.dtype, rope_pages.dtype)
    if kernel is None:
        return attend_with_aten(operands)
    lengths, offsets = seq_lens.to(torch.int64), None
    if operands.causal:
        offsets = lengths - query_count if first_positions is None else first_positions.to(torch.int64)
        offsets = offsets.contiguous()
        lengths = torch.minimum(lengths, offsets + query_count).clamp_(min=0)  # later keys may hold anything
    lengths = lengths.contiguous()
    q = q_latent.contiguous(), q_rope.contiguous()
    o = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)
    # How keys are distributed over threads depends on all sequences of a call.
    for b in [slice(0, batch)] if operands.split_tokens is None else [slice(b, b + 1) for b in range(batch)]:
        own = Cached(cached.latent, cached.k_rope, scales, table[b], cached.queries)
        of_own = lengths[b], None if offsets is None else offsets[b]
        attend(kernel, q[0][b], q[1][b], own, 0, None, operands.scale, o[b], lse[b], *of_own)
    return o, lse


paged_latent_attention_cpu = checked(PagedLatentAttention, attend_on_cpu)
general("paged_latent_attention")(paged_latent_attention_cpu)
