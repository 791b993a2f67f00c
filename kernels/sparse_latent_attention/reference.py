"""Absorbed MLA over named keys as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8 import dequantised
from ..scores import softmax_with_lse


def sparse_latent_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    uniform_when_empty: bool,
    latent_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::sparse_latent_attention` in the dtype of its inputs, float64 included; lse keeps that dtype.

    Args: q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]`, latent `[B, T, L]`, k_rope `[B, T, R]`, indices
    `[B, Sq, topk]`, mask None, bool or floating `[B, N, Sq, T]` (sizes of 1 broadcast), causal_offset, scale,
    uniform_when_empty, latent_scales None or `[B, T, G]`. T is at least 1.
    Returns: o `[B, Sq, N, L]`, lse `[B, Sq, N]`.
    """
    if latent_scales is not None:
        latent, k_rope = dequantised(latent, k_rope, latent_scales, q_latent.dtype)
    batch, queries, heads, _ = q_latent.shape
    tokens = latent.shape[1]
    named = (indices >= 0) & (indices < tokens)
    key = indices.where(named, 0).long()
    sequence = torch.arange(batch, device=key.device)[:, None, None]
    keys, ropes = latent[sequence, key], k_rope[sequence, key]
    seen = named
    if causal_offset is not None:
        seen = seen & (key <= torch.arange(queries, device=key.device)[:, None] + causal_offset)
    attended = seen
    if mask is not None:
        mask = mask.expand(batch, heads, queries, tokens).gather(3, key[:, None].expand(-1, heads, -1, -1))
        if mask.dtype == torch.bool:
            attended = seen & mask.any(1)
    # What nothing attends to may be anything, and 0 times NaN is NaN.
    keys, ropes = (part.masked_fill(~attended[..., None], 0.0) for part in (keys, ropes))
    scores = torch.einsum("bsnl,bskl->bnsk", q_latent, keys) + torch.einsum("bsnr,bskr->bnsk", q_rope, ropes)
    weights, lse = softmax_with_lse(scale * scores, mask, seen[:, None])
    o = torch.einsum("bnsk,bskl->bsnl", weights, keys)
    if uniform_when_empty:
        o = torch.where(lse.transpose(1, 2)[..., None] == -torch.inf, latent.mean(1)[:, None, None], o)
    return o, lse.transpose(1, 2)
