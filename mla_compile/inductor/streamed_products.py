"""Decompose products of few rows, which dominate a decode step on CPU besides attention, into sums for Inductor.

Such a product is as fast as its weights are read. BLAS libraries that do not know the CPU read them at half the rate of
a plain loop, and in half precision, on CPUs without matrix units for it, a hundred times slower.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

FEW_ROWS = 16
"""The limit for grouped products: more rows are likelier to share an expert, whose weights are read for each row."""


def mm_of_one_row(row: Tensor, matrix: Tensor) -> Any:
    """A decomposition for `make_fx`: `row [1, K] @ matrix [K, M] -> [1, M]`, summed in float32 or better.

    Returns NotImplemented for other devices and dtypes, for more rows, and for a matrix whose columns (a Linear's
    weights of one output) are not contiguous, which a sum would not read as a stream.
    """
    one_row = statically_known_true(row.shape[0] == 1)
    if not (one_row and _streams(row, matrix)):
        return NotImplemented
    return _sums(row, matrix.permute(1, 0)).unsqueeze(0)


def grouped_mm_of_few_rows(
    rows: Tensor,
    matrices: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """A decomposition for `make_fx`: groups of `rows [S, K]`, each times one of `matrices [E, K, M]` -> `[S, M]`.

    These are the experts of a token or two. Group e is the rows from `offsets[e - 1]` to `offsets[e]` (`[E]`, integers,
    ascending); results of rows behind the last offset are undefined. Each row reads its own expert's matrix, summed in
    float32 or better. Returns NotImplemented as `mm_of_one_row` does, for more than `FEW_ROWS` rows, and for other ways
    to group.
    """
    if offsets is None or bias is not None or out_dtype not in (None, rows.dtype):
        return NotImplemented
    by_expert = rows.dim() == 2 and matrices.dim() == 3 and statically_known_true(rows.shape[0] <= FEW_ROWS)
    if not (by_expert and _streams(rows, matrices)):
        return NotImplemented
    numbers = torch.arange(rows.shape[0], device=rows.device)
    expert = (offsets <= numbers.unsqueeze(1)).sum(-1).clamp(max=matrices.shape[0] - 1)
    return _sums(rows.unsqueeze(1), matrices.mT[expert])


def _streams(rows: Tensor, matrices: Tensor) -> bool:
    """Whether each column of the matrices is contiguous, and of a dtype that Inductor sums on CPU."""
    return rows.is_cpu and rows.is_floating_point() and statically_known_true(matrices.stride()[-2] == 1)


def _sums(rows: Tensor, columns: Tensor) -> Tensor:
    """`sum_k rows[..., k] columns[..., k]`, rounded once."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return (columns.to(dtype) * rows.to(dtype)).sum(-1).to(rows.dtype)
