"""`mla::per_head_matmul` as the equation says it."""

from __future__ import annotations

import torch
from torch import Tensor


def per_head_matmul_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`out[b, s, n, o] = sum_i x[b, s, n, i] weight[n, i, o]`."""
    return torch.einsum("bsni,nio->bsno", x, weight)
