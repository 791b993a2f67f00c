"""`mla::per_head_matmul` as the equation says."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from .arguments import PerHeadMatmul


def multiply_by_head(operands: PerHeadMatmul) -> Tensor:
    """`out[b, s, n, o] = sum_i x[b, s, n, i] weight[n, i, o]`."""
    return torch.einsum("bsni,nio->bsno", operands.x, operands.weight)


per_head_matmul_reference = unchecked(PerHeadMatmul, multiply_by_head)
