"""One batched product over the heads: a call to the library, not generated code.

On CPU Inductor turns a `bmm` of one row into loops, which for the one query of a decode step take ten times as long as
the library's product with the same weights. In half precision it takes a transposed matrix for each head as it is only
if there are no gaps between heads, as there are in a weight that has W_UK too: else torch writes out the transpose,
which for 32 rows takes longer than the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_products import has_products
from ..bundles import checked, implement
from .arguments import PerHeadMatmul


def multiply(operands: PerHeadMatmul) -> Tensor:
    """`[B, Sq, N, O]`."""
    x, weight = operands.x, operands.weight
    B, Sq, N, width = x.shape
    if x.is_cpu and not has_products(x.dtype):
        return multiply(PerHeadMatmul(x.float(), weight.float())).to(x.dtype)
    out = x.new_empty((B, Sq, N, weight.shape[2]))
    rows = x.reshape(B * Sq, N, width).transpose(0, 1)
    if x.is_cpu and x.itemsize == 2 and weight.stride(1) == 1:
        weight = weight.mT.contiguous().mT
    torch.bmm(rows, weight, out=out.flatten(0, 1).transpose(0, 1))  # written in place: the library takes these strides
    return out


per_head_matmul_aten = checked(PerHeadMatmul, multiply)
implement("per_head_matmul", "CompositeExplicitAutograd", per_head_matmul_aten)
