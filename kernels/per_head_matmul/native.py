"""One matrix per head in C++ (`native.cpp`) for the few rows of a decode step: the implementation for CPU tensors.

Such a product can be as fast as its weight is read, which `torch.bmm` of one row is not. Everything else goes to
`aten.py`: float64, more rows, a weight that is contiguous in neither dim, no C++ compiler.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...cpu_products import has_products
from ..bundles import checked
from ..dispatcher import general
from ..native import LINE_PRODUCTS, NUMBER, PAIRS, TYPES, VECTOR, Kernels
from .arguments import PerHeadMatmul
from .aten import multiply

_MOST_ROWS = 16
"""Queries of all sequences up to which this is faster than a library's product."""
_MOST_ROWS_ALONE = 32
"""The same where no library multiplies matrices of the dtype, so that the alternative is a product in float32."""
_OWN = ("call.h", "task.h", "floats.h", "line_pairs.h", "native.cpp")
KERNELS = Kernels(
    (VECTOR, NUMBER, PAIRS, LINE_PRODUCTS, *(Path(__file__).with_name(name) for name in _OWN)),
    ("const void*",) * 2 + ("void*",) + ("int64_t",) * 10,
)


def multiply_on_cpu(operands: PerHeadMatmul) -> Tensor:
    """`[B, Sq, N, O]`."""
    x, weight = operands.x, operands.weight
    kernel = KERNELS.of(x.dtype) if _suits(x, weight) else None
    if kernel is None:
        return multiply(operands)
    batch, query_count, heads, inner = x.shape
    rows = x.reshape(batch * query_count, heads, inner)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    out = x.new_empty((batch, query_count, heads, weight.shape[2]))
    sizes = batch * query_count, *weight.shape
    kernel(rows, weight, out, *sizes, *rows.stride()[:2], *weight.stride(), torch.get_num_threads())
    return out


def _suits(x: Tensor, weight: Tensor) -> bool:
    few = 0 < x.shape[0] * x.shape[1] <= (_MOST_ROWS if has_products(x.dtype) else _MOST_ROWS_ALONE)
    return few and x.dtype in TYPES and 1 in weight.stride()[1:] and weight.numel() > 0


per_head_matmul_cpu = checked(PerHeadMatmul, multiply_on_cpu)
general("per_head_matmul")(per_head_matmul_cpu)
