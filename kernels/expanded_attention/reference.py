"""MLA with all keys and values up-projected, as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scores import blanked, causal_mask, softmax_with_lse


def expanded_attention_reference(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`mla::expanded_attention` in the dtype of its inputs, float64 included; lse keeps that dtype.

    Args: q `[B, Sq, N, P + R]`, latent `[B, T, L]`, k_rope `[B, T, R]`, w_uk `[N, P, L]`, w_uv `[N, V, L]`, mask None,
    bool or floating `[B, N, Sq, T]` (sizes of 1 broadcast), causal_offset, scale.
    Returns: o `[B, Sq, N, V]`, lse `[B, Sq, N]`.
    """
    causal = causal_mask(q.shape[1], latent.shape[1], causal_offset, latent.device)
    latent, k_rope = blanked((latent, k_rope), mask, causal)
    k_nope = torch.einsum("btl,npl->btnp", latent, w_uk)
    k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, w_uk.shape[0], -1)], dim=-1)
    v = torch.einsum("btl,nvl->btnv", latent, w_uv)
    weights, lse = softmax_with_lse(scale * torch.einsum("bsnd,btnd->bnst", q, k), mask, causal)
    return torch.einsum("bnst,btnv->bsnv", weights, v), lse.transpose(1, 2)
