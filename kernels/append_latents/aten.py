"""Quantising into a cache with ATen operations: the CPU implementation, and that of any device without a kernel."""

from __future__ import annotations

import torch

from ...fp8 import RowLayout, quantised, quantised_by
from ..bundles import checked, implement
from ..dispatcher import general
from .arguments import AppendLatents


def append(x: AppendLatents) -> None:
    """Write to `x.rows`."""
    kept, rows, scale = x.slots >= 0, x.rows, x.scale
    latent, k_rope, slots = x.latent[kept], x.k_rope[kept], x.slots[kept].long()
    place = slots // rows.shape[1], slots % rows.shape[1]
    if scale is not None:
        rows.view(torch.uint8)[place] = quantised_by(torch.cat([latent, k_rope], dim=1), scale).view(torch.uint8)
        return
    numbers, scales, rope = RowLayout(latent.shape[1], k_rope.shape[1], k_rope.dtype).views(rows)
    own, scales[place] = quantised(latent)
    # Indexing does not support FP8, so the same memory is indexed as bytes.
    numbers.view(torch.uint8)[place] = own.view(torch.uint8)
    rope[place] = k_rope


append_latents_aten = checked(AppendLatents, append)
implement("append_latents", "CompositeExplicitAutograd", append_latents_aten)
general("append_latents")(append_latents_aten)
