"""Numbers of a byte that scales make of any size: which there are, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import FP8
from .int8 import INT8

CODED = (FP8, INT8)
"""Dtypes in which a cache may be, with scales beside it."""


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers `[..., L]` times the scales `[..., G]` of their groups, multiplied in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    grouped = numbers.to(wide).unflatten(-1, (scales.shape[-1], -1)) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
