"""One-byte numbers with scales: the dtypes of coded caches, and the values that they represent."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import FP8
from .int8 import INT8

CODED = (FP8, INT8)
"""The dtypes of caches that have scales beside them."""


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply numbers `[..., L]` by the scales `[..., G]` of their groups, in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    grouped = numbers.to(wide).unflatten(-1, (scales.shape[-1], -1)) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
