"""Paged absorbed MLA as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...coded import HELD
from ...int4 import unpacked
from ..bundles import unchecked
from ..coded import is_packed
from ..latent_attention.reference import latent_attention_reference
from ..pages import Pages
from .arguments import PagedLatentAttention


def attend_sequence_by_sequence(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse `[B, Sq, N]`, both in the dtype of the queries, float64 included."""
    results = []
    for b, length in enumerate(x.seq_lens.tolist()):
        this = slice(b, b + 1)
        latent, k_rope = keys(x.pages, b, length, x.q_latent.dtype)
        start = length - x.q_latent.shape[1] if x.first_positions is None else int(x.first_positions[b])
        causal_offset = start if x.causal else None
        own = None if x.mask is None else x.mask.expand(len(x.seq_lens), -1, -1, -1)[this]
        if own is not None and own.shape[3] != 1:
            own = own[..., :length]
        results.append(
            latent_attention_reference(
                x.q_latent[this], x.q_rope[this], latent[None], k_rope[None], own, causal_offset, x.scale
            )
        )
    if not results:
        return x.q_latent.new_empty(x.q_latent.shape), x.q_latent.new_empty(x.q_latent.shape[:3])
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


def keys(pages: Pages, b: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys of one sequence: latent `[length, L]`, k_rope `[length, R]`."""
    page_size = pages.page_size
    position = torch.arange(length, device=pages.table.device)
    page, row = pages.table[b, position // page_size].long(), position % page_size
    numbers = unpacked(pages.latent) if is_packed(pages.latent, pages.scales) else pages.latent
    latent, k_rope = (part.to(dtype)[page, row] for part in (numbers, pages.rope))
    if pages.scales is not None:
        groups = pages.scales.shape[2]
        scales = pages.scales.to(dtype).expand(*pages.latent.shape[:2], groups)[page, row]
        latent = (latent.unflatten(1, (groups, -1)) * scales[:, :, None]).flatten(1)
        if pages.rope.dtype in HELD:
            k_rope = k_rope * scales
    return latent, k_rope


paged_latent_attention_reference = unchecked(PagedLatentAttention, attend_sequence_by_sequence)
