"""Latents in INT8, as `INT8PagePool` stores them: integers from -127 to 127 times a float32 scale per token."""

from __future__ import annotations

import torch
from torch import Tensor

from .scales import scaled_down

INT8 = torch.int8
MOST = 127
"""The integer to which the greatest magnitude of a token is scaled."""


def quantised(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise latents: `[..., L]` in int8, rounded half to even, and scales `[..., 1]`, the largest magnitude over
    127.

    If a token is not finite, its scale is not either, and so neither is anything that is read back.
    """
    numbers, scales = scaled_down(latent, 1, MOST)
    return numbers.round().to(INT8), scales
