"""Absorbed MLA as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scores import blanked, causal_mask, softmax_with_lse


def latent_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`mla::latent_attention` in the dtype of its inputs, float64 included; lse keeps that dtype.

    Args: q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]`, latent `[B, T, L]`, k_rope `[B, T, R]`, mask None, bool or
    floating `[B, N, Sq, T]` (sizes of 1 broadcast), causal_offset, scale.
    Returns: o `[B, Sq, N, L]`, lse `[B, Sq, N]`.
    """
    causal = causal_mask(q_latent.shape[1], latent.shape[1], causal_offset, latent.device)
    latent, k_rope = blanked((latent, k_rope), mask, causal)
    scores = torch.einsum("bsnl,btl->bnst", q_latent, latent) + torch.einsum("bsnr,btr->bnst", q_rope, k_rope)
    weights, lse = softmax_with_lse(scale * scores, mask, causal)
    return torch.einsum("bnst,btl->bsnl", weights, latent), lse.transpose(1, 2)
