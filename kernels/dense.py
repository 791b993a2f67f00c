"""Rows that a kernel can read, whose numbers lie side by side."""

from __future__ import annotations

from torch import Tensor


def dense(rows: Tensor) -> Tensor:
    """The same rows `[..., L]`, copied if their last stride is not 1."""
    return rows if rows.shape[-1] < 2 or rows.stride(-1) == 1 else rows.contiguous()
