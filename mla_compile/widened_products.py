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

from .cpu_products import has_products
from .ops import widened_matmul


def widened_mm(rows: Tensor, matrix: Tensor) -> Any:
    """`rows [S, K] @ matrix [K, M] -> [S, M]`; a decomposition for `make_fx`.

    NotImplemented where a library has such products.
    """
    if not _are_to_be_widened(rows, matrix):
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


def widened_bmm(rows: Tensor, matrices: Tensor, *, are_given: Callable[[Tensor], bool] = lambda _: False) -> Any:
    """`rows [B, S, K] @ matrices [B, K, M] -> [B, S, M]`; as `widened_mm`.

    Matrices that `are_given` are in memory whatever the graph computes: a second one of them, twice as large, is not
    written.
    """
    if not _are_to_be_widened(rows, matrices):
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
