"""One batched product over the heads, called and not generated.

Inductor turns a `bmm` of one row into loops on CPU, which for the one query of a decode step take ten times as long as
the library's product over the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from .arguments import PerHeadMatmul


def multiply(operands: PerHeadMatmul) -> Tensor:
    """`[B, Sq, N, O]`."""
    x, weight = operands.x, operands.weight
    B, Sq, N, width = x.shape
    out = x.new_empty((B, Sq, N, weight.shape[2]))
    if B * Sq == 1:
        torch.bmm(x.view(N, 1, width), weight, out=out.view(N, 1, weight.shape[2]))
    else:
        by_row = torch.bmm(x.reshape(B * Sq, N, width).transpose(0, 1), weight).transpose(0, 1)
        out.view(by_row.shape).copy_(by_row)
    return out


per_head_matmul_aten = checked(PerHeadMatmul, multiply)
implement("per_head_matmul", "CompositeExplicitAutograd", per_head_matmul_aten)
