"""Paged absorbed MLA as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..latent_attention.reference import latent_attention_reference


def paged_latent_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_latent_attention` in the dtype of the queries, float64 included; lse keeps that dtype.

    Args: as `mla_compile.ops` says. Returns: o `[B, Sq, N, L]`, lse `[B, Sq, N]`.
    """
    results = []
    for b, length in enumerate(seq_lens.tolist()):
        this = slice(b, b + 1)
        latent, k_rope = keys(latent_pages, rope_pages, block_table[b], length, q_latent.dtype, latent_scales)
        start = length - q_latent.shape[1] if first_positions is None else int(first_positions[b])
        causal_offset = start if causal else None
        own = None if mask is None else mask.expand(len(seq_lens), -1, -1, -1)[this]
        if own is not None and own.shape[3] != 1:
            own = own[..., :length]
        results.append(
            latent_attention_reference(
                q_latent[this], q_rope[this], latent[None], k_rope[None], own, causal_offset, scale
            )
        )
    if not results:
        return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:3])
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


def keys(
    latent_pages: Tensor,
    rope_pages: Tensor,
    table: Tensor,
    length: int,
    dtype: torch.dtype,
    latent_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The keys of one sequence: latent `[length, L]`, k_rope `[length, R]`. Its pages are table, `[max_pages]`."""
    page_size = latent_pages.shape[1]
    position = torch.arange(length, device=table.device)
    page, row = table[position // page_size].long(), position % page_size
    latent, k_rope = (pages.to(dtype)[page, row] for pages in (latent_pages, rope_pages))
    if latent_scales is not None:
        groups = latent_scales.shape[2]
        scales = latent_scales.to(dtype).expand(*latent_pages.shape[:2], groups)[page, row]
        latent = (latent.unflatten(1, (groups, -1)) * scales[:, :, None]).flatten(1)
        if rope_pages.dtype == torch.float8_e4m3fn:
            k_rope = k_rope * scales
    return latent, k_rope
