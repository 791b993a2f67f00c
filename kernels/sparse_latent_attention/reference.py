"""Absorbed MLA over named keys as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from ..coded import dequantised
from ..scores import softmax_with_lse
from .arguments import SparseLatentAttention


def attend_to_named(x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse `[B, Sq, N]`, both in the dtype of the queries, float64 included. T must be at least 1."""
    latent, k_rope, mask = x.latent, x.k_rope, x.mask
    if x.latent_scales is not None:
        latent, k_rope = dequantised(latent, k_rope, x.latent_scales, x.q_latent.dtype)
    batch, queries, heads, _ = x.q_latent.shape
    tokens = latent.shape[1]
    named = (x.indices >= 0) & (x.indices < tokens)
    key = x.indices.where(named, 0).long()
    sequence = torch.arange(batch, device=key.device)[:, None, None]
    keys, ropes = latent[sequence, key], k_rope[sequence, key]
    seen = named
    if x.causal_offset is not None:
        seen = seen & (key <= torch.arange(queries, device=key.device)[:, None] + x.causal_offset)
    attended = seen
    if mask is not None:
        mask = mask.expand(batch, heads, queries, tokens).gather(3, key[:, None].expand(-1, heads, -1, -1))
        if mask.dtype == torch.bool:
            attended = seen & mask.any(1)
    # Keys that nothing attends to may hold anything, and 0 times NaN is NaN.
    keys, ropes = (part.masked_fill(~attended[..., None], 0.0) for part in (keys, ropes))
    scores = torch.einsum("bsnl,bskl->bnsk", x.q_latent, keys) + torch.einsum("bsnr,bskr->bnsk", x.q_rope, ropes)
    weights, lse = softmax_with_lse(x.scale * scores, mask, seen[:, None])
    o = torch.einsum("bnsk,bskl->bsnl", weights, keys)
    if x.uniform_when_empty:
        o = torch.where(lse.transpose(1, 2)[..., None] == -torch.inf, latent.mean(1)[:, None, None], o)
    return o, lse.transpose(1, 2)


sparse_latent_attention_reference = unchecked(SparseLatentAttention, attend_to_named)
