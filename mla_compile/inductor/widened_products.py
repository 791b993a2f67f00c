"""Decompose half-precision products into float32 ones on CPUs whose libraries have none.

On such CPUs a prompt in bfloat16 would spend nine tenths of its time in these products. `mla::widened_matmul` widens
weights as it multiplies, and likewise the matrices of a batch if they are given; matrices that the graph computes are
widened by the code that computes them. As in a library, the result is rounded once, here by the surrounding code that
Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..cpu_products import has_products
from ..ops import widened_matmul

AreGiven = Callable[[Tensor], bool]
"""Whether matrices are in memory anyway: inputs of the graph, or views of them."""


def widened_mm(rows: Tensor, matrix: Tensor) -> Any:
    """A decomposition for `make_fx`: `rows [S, K] @ matrix [K, M] -> [S, M]`.

    Returns NotImplemented if a library has such products.
    """
    if not _are_to_be_widened(rows, matrix):
        return NotImplemented
    return widened_matmul(rows, matrix).to(rows.dtype)


def widened_addmm(bias: Tensor, rows: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Like `widened_mm`, for `beta bias + alpha rows [S, K] @ matrix [K, M]`, rounded once."""
    if not _are_to_be_widened(rows, matrix) or bias.dtype != rows.dtype:
        return NotImplemented
    product = widened_matmul(rows, matrix)
    added = bias.to(product.dtype)
    # With beta 0 the bias is ignored, so it may hold anything, NaN included.
    sum_of_both = alpha * product if beta == 0 else beta * added + alpha * product
    return sum_of_both.to(rows.dtype)


def widened_bmm(rows: Tensor, matrices: Tensor, *, are_given: AreGiven = lambda _: False) -> Any:
    """Like `widened_mm`, for `rows [B, S, K] @ matrices [B, K, M] -> [B, S, M]`.

    For matrices that are given, no widened copy, twice as large, is written. Also returns NotImplemented for one row or
    column, as such products become sums that Inductor generates.
    """
    if not _are_to_be_widened(rows, matrices):
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
    """Like `widened_mm`, for groups of `rows [S, K]`, each times one of `matrices [E, K, M]` -> `[S, M]`: experts."""
    if offsets is None or bias is not None or out_dtype not in (None, rows.dtype):
        return NotImplemented
    if rows.dim() != 2 or matrices.dim() != 3 or not _are_to_be_widened(rows, matrices):
        return NotImplemented
    return widened_matmul(rows, matrices, offsets).to(rows.dtype)


def _are_to_be_widened(rows: Tensor, matrices: Tensor) -> bool:
    return rows.is_cpu and rows.dtype == matrices.dtype and not has_products(rows.dtype)
