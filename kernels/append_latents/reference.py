"""Quantising tokens into a cache, one after the other: the oracle of every other implementation."""

from __future__ import annotations

import torch

from ...fp8 import FP8, MOST, RowLayout
from ...scales import LEAST
from ..bundles import unchecked
from .arguments import AppendLatents


def append_one_by_one(x: AppendLatents) -> None:
    """Write to `x.rows`."""
    page_size = x.rows.shape[1]
    layout = RowLayout(x.latent.shape[1], x.k_rope.shape[1], x.k_rope.dtype)
    for token, slot in enumerate(x.slots.tolist()):
        if slot < 0:
            continue
        row = x.rows[slot // page_size, slot % page_size]
        if x.scale is not None:
            both = torch.cat([x.latent[token], x.k_rope[token]]).float() / x.scale.item()
            row.copy_(both.clamp(-MOST, MOST).to(FP8))
            continue
        numbers, scales, rope = layout.views(row)
        grouped = x.latent[token].float().unflatten(0, (layout.groups, -1))
        own = grouped.abs().amax(1).clamp_min(LEAST) / MOST
        scales.copy_(own)
        numbers.copy_((grouped / own[:, None]).flatten().to(FP8))
        rope.copy_(x.k_rope[token])


append_latents_reference = unchecked(AppendLatents, append_one_by_one)
