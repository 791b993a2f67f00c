"""Latents in INT8, as `INT8PagePool` keeps them: a whole number from -127 to 127 times a float32 scale of its token."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import LEAST

INT8 = torch.int8
MOST = 127
"""What the greatest magnitude of a token becomes."""


def quantised(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Latents `[..., L]` in int8, halves to even, and their scales `[..., 1]`, the greatest magnitude over 127.

    Of a token that is not finite its scale is not either, and so nothing that is read of it.
    """
    wide = latent.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(LEAST) / MOST
    return (wide / scales).round().to(INT8), scales
