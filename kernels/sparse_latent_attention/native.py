"""Absorbed MLA over named keys in C++: the implementation for CPU tensors.

In compiled graphs, `dispatcher/sparse_latent_attention.h` does the same without this Python code.

This is the kernel of `latent_attention`, called with each query as a sequence whose keys lie in pages of one key. Keys
that a query does not attend to are left out of its table. Masks that are floating or differ between heads, float64,
keys whose last dim is not contiguous, and a machine without a C++ compiler go to `aten.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked
from ..dispatcher import general
from ..latent_attention.cached import KERNELS, MOST_ROWS, Cached, attend
from .arguments import SparseLatentAttention
from .aten import attend as attend_with_aten
from .aten import finished


def attend_on_cpu(x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    q_latent, q_rope, latent, k_rope, mask = x.q_latent, x.q_rope, x.latent, x.k_rope, x.mask
    batch, query_count, heads, _ = q_latent.shape
    tokens = latent.shape[1]
    scales = None if x.latent_scales is None else x.latent_scales.expand(batch, tokens, -1)[:, :, None]
    cached = Cached(latent[:, :, None], k_rope[:, :, None], scales)
    kernel = None
    one_for_all_heads = mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)
    if one_for_all_heads and 0 < heads <= MOST_ROWS and batch * query_count and tokens and cached.readable():
        kernel = KERNELS.of(q_latent.dtype, latent.dtype, k_rope.dtype)
    if kernel is None:
        return attend_with_aten(x)
    table, lengths = _attended(x)
    o = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((batch, query_count, heads), dtype=torch.float32)
    each = batch * query_count, 1, heads
    q = q_latent.reshape(*each, q_latent.shape[3]).contiguous(), q_rope.reshape(*each, q_rope.shape[3]).contiguous()
    cached = Cached(cached.latent, cached.k_rope, scales, table, query_count)
    attend(kernel, *q, cached, 0, None, x.scale, o.view(*each, o.shape[3]), lse.view(each), lengths)
    return finished(x, o, lse)


def _attended(x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """The keys that each query attends to, first in its row, int64 `[B * Sq, topk]`, and their number, `[B * Sq]`."""
    (batch, query_count, _), tokens, mask = x.indices.shape, x.latent.shape[1], x.mask
    keys = x.indices.to(torch.int64)
    seen = (keys >= 0) & (keys < tokens)
    if x.causal_offset is not None:
        seen &= keys <= torch.arange(x.causal_offset, x.causal_offset + query_count)[:, None]
    if mask is not None:
        seen &= mask[:, 0].expand(batch, query_count, tokens).gather(2, keys.where(seen, 0))
    if not bool(seen.all()):
        keys = keys.gather(2, seen.logical_not().argsort(dim=2, stable=True))
    return keys.flatten(0, 1).contiguous(), seen.sum(2).flatten()


sparse_latent_attention_cpu = checked(SparseLatentAttention, attend_on_cpu)
general("sparse_latent_attention")(sparse_latent_attention_cpu)
