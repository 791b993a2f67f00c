"""Numbers times a float32 scale for each group of columns: what all caches in few bits store of a latent."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 2.0**-100
"""The lower bound for a group's greatest magnitude, so that no scale is 0."""


def scaled_down(latent: Tensor, groups: int, most: float) -> tuple[Tensor, Tensor]:
    """Latents `[..., L]` in float32 over scales `[..., G]`, by which the greatest magnitude of each of `groups` groups
    becomes `most`; and the scales."""
    grouped = latent.float().unflatten(-1, (groups, -1))
    scales = grouped.abs().amax(-1).clamp_min(LEAST) / most
    return (grouped / scales[..., None]).flatten(-2), scales


def scaled_up(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply numbers `[..., L]` by the scales `[..., G]` of their groups, in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    grouped = numbers.to(wide).unflatten(-1, (scales.shape[-1], -1)) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
