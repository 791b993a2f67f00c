"""`mla::widened_matmul` as the equation says."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from .arguments import WidenedMatmul


def multiply_widened(operands: WidenedMatmul) -> Tensor:
    """`out[s, m] = sum_k x[s, k] weight[e, k, m]`, where e is the group of row s; 0 for rows of no group."""
    x, weight, ends = operands.x.to(operands.dtype), operands.weight.to(operands.dtype), operands.ends
    if ends is None:
        return x @ weight
    rows = torch.arange(x.shape[0], device=x.device)
    group = (ends <= rows.unsqueeze(1)).sum(-1)
    weight = torch.cat([weight, weight.new_zeros((1, *weight.shape[1:]))])
    return torch.einsum("sk,skm->sm", x, weight[group])


widened_matmul_reference = unchecked(WidenedMatmul, multiply_widened)
