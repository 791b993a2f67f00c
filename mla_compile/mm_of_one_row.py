"""A product of one row as a sum that Inductor generates: what a decode step on CPU mostly does outside of attention.

Such a product is as fast as its weight is read. BLAS libraries read it at half the rate of a plain loop where they do
not know the CPU, and a hundred times slower in half precision on one without matrix units for it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def mm_of_one_row(row: Tensor, matrix: Tensor) -> Any:
    """`row [1, K] @ matrix [K, M] -> [1, M]`, summed in float32 or better; a decomposition for `make_fx`.

    NotImplemented for other devices and dtypes, more rows, and a matrix whose columns (a Linear's weights of one
    output) are not contiguous: what such a sum would read is not a stream.
    """
    one_row, contiguous = statically_known_true(row.shape[0] == 1), statically_known_true(matrix.stride()[0] == 1)
    if not (one_row and contiguous and row.is_cpu and row.is_floating_point()):
        return NotImplemented
    dtype = torch.promote_types(row.dtype, torch.float32)
    return (matrix.t().to(dtype) * row.to(dtype)).sum(-1).to(row.dtype).unsqueeze(0)
