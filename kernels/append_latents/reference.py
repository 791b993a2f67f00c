"""Tokens quantised into a cache, one after the other: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fp8 import FP8, LEAST, MOST, RowLayout


def append_latents_reference(
    latent: Tensor, k_rope: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None = None
) -> None:
    """`mla::append_latents`; args as `mla_compile.ops` says."""
    page_size = rows.shape[1]
    layout = RowLayout(latent.shape[1], k_rope.shape[1], k_rope.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        row = rows[slot // page_size, slot % page_size]
        if scale is not None:
            both = torch.cat([latent[token], k_rope[token]]).float() / scale.item()
            row.copy_(both.clamp(-MOST, MOST).to(FP8))
            continue
        numbers, scales, rope = layout.views(row)
        grouped = latent[token].float().unflatten(0, (layout.groups, -1))
        own = grouped.abs().amax(1).clamp_min(LEAST) / MOST
        scales.copy_(own)
        numbers.copy_((grouped / own[:, None]).flatten().to(FP8))
        rope.copy_(k_rope[token])
