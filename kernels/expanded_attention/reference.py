"""MLA with all keys and values up-projected, as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from ..scores import blanked, causal_mask, softmax_with_lse
from ..two_latents import latents_of
from .arguments import ExpandedAttention


def attend_to_expanded(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse `[B, Sq, N]`, both in the dtype of the inputs, float64 included. There is no workspace."""
    causal = causal_mask(x.q.shape[1], x.latent.shape[1], x.causal_offset, x.latent.device)
    latent, ropes = blanked((x.latent, x.ropes), x.mask, causal)
    of_keys, of_values = latents_of(latent, x.w_uk, x.w_uv)
    k_nope = torch.einsum("btl,npl->btnp", of_keys, x.w_uk)
    k = torch.cat([k_nope, ropes.expand(-1, -1, x.w_uk.shape[0], -1)], dim=-1)
    v = torch.einsum("btl,nvl->btnv", of_values, x.w_uv)
    weights, lse = softmax_with_lse(x.scale * torch.einsum("bsnd,btnd->bnst", x.q, k), x.mask, causal)
    return torch.einsum("bnst,btnv->bsnv", weights, v), lse.transpose(1, 2)


expanded_attention_reference = unchecked(ExpandedAttention, attend_to_expanded)
