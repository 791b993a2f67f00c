"""Convert one panel of the weight to float32 at a time, and call the library's product with it.

A panel that has just been written is read from the processor's caches, and no second copy of the weight is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from .arguments import WidenedMatmul

PANEL_BYTES = 2 << 20
"""The size of a panel in float32: it fits a last-level cache, and has enough columns for the library's product."""
_FEWEST_COLUMNS = 64
"""The fewest columns of a panel, however many rows the weight has."""


def multiply(operands: WidenedMatmul) -> Tensor:
    """`[S, M]`."""
    x = operands.x.to(operands.dtype)
    out = x.new_empty((x.shape[0], operands.weight.shape[-1]))
    for rows, weight in operands.groups():
        multiply_by_panels(x[rows], weight, out[rows])
    return out


def multiply_by_panels(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Set out `[S, M]`, of x's dtype, to x `[S, K]` times weight `[K, M]`, of any dtype.

    Panels have the weight's memory layout.
    """
    inner, outer = weight.shape
    most = max(PANEL_BYTES // max(inner * x.itemsize, 1), _FEWEST_COLUMNS)
    memory = x.new_empty((min(most, outer) * inner,))
    for start in range(0, outer, most):
        part = weight[:, start : start + most]
        panel = memory[: part.numel()]
        panel = panel.view(part.shape) if weight.stride(1) == 1 else panel.view(part.shape[::-1]).t()
        torch.mm(x, panel.copy_(part), out=out[:, start : start + most])


widened_matmul_aten = checked(WidenedMatmul, multiply)
implement("widened_matmul", "CompositeExplicitAutograd", widened_matmul_aten)
