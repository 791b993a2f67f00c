"""Absorbed MLA as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from ..scores import blanked, causal_mask, softmax_with_lse
from .arguments import LatentAttention


def attend_to_all(x: LatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse `[B, Sq, N]`, both in the dtype of the inputs, float64 included."""
    causal = causal_mask(x.q_latent.shape[1], x.latent.shape[1], x.causal_offset, x.latent.device)
    latent, k_rope = blanked((x.latent, x.k_rope), x.mask, causal)
    scores = torch.einsum("bsnl,btl->bnst", x.q_latent, latent) + torch.einsum("bsnr,btr->bnst", x.q_rope, k_rope)
    weights, lse = softmax_with_lse(x.scale * scores, x.mask, causal)
    return torch.einsum("bnst,btl->bsnl", weights, latent), lse.transpose(1, 2)


latent_attention_reference = unchecked(LatentAttention, attend_to_all)
