"""Products in half precision by way of float32, on CPUs whose libraries have none.

There a prompt in bfloat16 would spend nine tenths of its time in them. `mla::widened_matmul` widens weights as it
multiplies, and so it does the matrices of a batch where they are given; those that are computed anyway are widened by
the code that computes them. What a product gives is rounded once, as a library does it, by the code around it that
Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .cpu_products import has_products
from .ops import widened_matmul

AreGiven = Callable[[Tensor], bool]
"""Whether matrices are in memory whatever a graph computes."""


def widened_mm(rows: Tensor, matrix: Tensor, *, are_given: AreGiven = lambda _: True) -> Any:
    """`rows [S, K] @ matrix [K, M] -> [S, M]`; a decomposition for `make_fx`.

    NotImplemented where a library has such products, and under Inductor's `freezing` where the matrix is computed: that
    has products of its own with weights in int8, which it finds by the product.
    """
    if not _are_to_be_widened(rows, matrix) or (config.freezing and not are_given(matrix)):
        return NotImplemented
    return widened_matmul(rows, matrix).to(rows.dtype)


def widened_addmm(bias: Tensor, rows: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta bias + alpha rows [S, K] @ matrix [K, M]`, rounded once; as `widened_mm`."""
    if not _are_to_be_widened(rows, matrix) or bias.dtype != rows.dtype:
        return NotImplemented
    product = widened_matmul(rows, matrix)
    added = bias.to(product.dtype)
    # A bias that counts for nothing may hold anything.
    sum_of_both = alpha * product if beta == 0 else beta * added + alpha * product
    return sum_of_both.to(rows.dtype)


def widened_bmm(rows: Tensor, matrices: Tensor, *, are_given: AreGiven = lambda _: False) -> Any:
    """`rows [B, S, K] @ matrices [B, K, M] -> [B, S, M]`; as `widened_mm`.

    Of matrices that are given a second one, twice as large, is not written. NotImplemented too of one row or column,
    which become sums that Inductor generates.
    """
    if not _are_to_be_widened(rows, matrices) or (config.freezing and not are_given(matrices)):
        return NotImplemented
    if statically_known_true(rows.shape[1] == 1) or statically_known_true(matrices.shape[2] == 1):
        return NotImplemented
    if are_given(matrices):
        batch, count, _ = rows.shape
        ends = (torch.arange(batch, device=rows.device) + 1) * count
        product = widened_matmul(rows.flatten(0, 1), matrices, ends)
        return product.view(batch, count, matrices.shape[2]).to(rows.dtype)
    return torch.bmm(rows.to(torch.float32), matrices.to(torch.float32)).to(rows.dtype)


def widened_grouped_mm(
    rows: Tensor,
    matrices: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`rows [S, K]` by groups, each times one of `matrices [E, K, M]` -> `[S, M]`: experts; as `widened_mm`."""
    if offsets is None or bias is not None or out_dtype not in (None, rows.dtype):
        return NotImplemented
    if rows.dim() != 2 or matrices.dim() != 3 or not _are_to_be_widened(rows, matrices):
        return NotImplemented
    return widened_matmul(rows, matrices, offsets).to(rows.dtype)


def _are_to_be_widened(rows: Tensor, matrices: Tensor) -> bool:
    return rows.is_cpu and rows.dtype == matrices.dtype and not has_products(rows.dtype)
