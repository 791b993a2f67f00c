"""Latents in INT4, as `INT4PagePool` stores them: integers from -7 to 7 times a float32 scale per group of columns.

A byte holds the numbers of two neighbouring columns, each plus 8: that of the even column in its lower half, that of
the odd one in its upper half.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .scales import scaled_down

# torch's stubs lack both.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
PACKED = torch.uint8
"""The dtype of tensors that hold two numbers in each element."""
BIAS = 8
"""What is added to a number that is stored."""
MOST = 7
"""The integer to which the greatest magnitude of a group is scaled."""
GROUP = 32
"""The number of latent columns that share a scale, at most."""


def groups_of(latent_width: int) -> int:
    """`G`, the number of scales of a token: one for each 32 columns, or 16 if 32 do not divide them; else one."""
    group = math.gcd(latent_width, GROUP)
    return latent_width // group if group >= GROUP // 2 else 1


def packed(numbers: Tensor) -> Tensor:
    """Numbers `[..., L]` in int8, from -8 to 7, two in a byte: `[..., L / 2]`, L even."""
    even, odd = (numbers + BIAS).to(PACKED).unflatten(-1, (-1, 2)).unbind(-1)
    return even | (odd << 4)


def unpacked(codes: Tensor) -> Tensor:
    """The numbers `[..., L]` in int8 of bytes `[..., L / 2]`."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8) - BIAS


def quantised(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise latents `[..., L]`: bytes `[..., L / 2]` of numbers that are rounded half to even, and scales
    `[..., G]`, each the largest magnitude of a group over 7.

    If a number is not finite, the scale of its group is not either, and so neither is anything that is read back.
    """
    numbers, scales = scaled_down(latent, groups_of(latent.shape[-1]), MOST)
    return packed(numbers.round().to(torch.int8)), scales
