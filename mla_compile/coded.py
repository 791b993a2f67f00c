"""Numbers in few bits with scales: the dtypes of coded caches, and the values that they represent."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import FP8
from .int4 import INT4, PACKED
from .int8 import INT8

CODED = (FP8, INT8, INT4)
"""What numbers of caches that have scales beside them may be."""
HELD = (FP8, INT8, PACKED)
"""The dtypes of the tensors that hold them, in this order."""


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply numbers `[..., L]` by the scales `[..., G]` of their groups, in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    grouped = numbers.to(wide).unflatten(-1, (scales.shape[-1], -1)) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
