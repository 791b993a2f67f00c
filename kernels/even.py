"""Rows for a library's product in half precision, whose inner size has to be even."""

from __future__ import annotations

import torch
from torch import Tensor


def even(rows: Tensor) -> Tensor:
    """Pad rows `[., L]` with a 0 where L is odd in half precision.

    A library that multiplies pairs of numbers would read on into the next row.
    """
    return torch.nn.functional.pad(rows, (0, 1)) if rows.itemsize < 4 and rows.shape[1] % 2 else rows
