"""Numbers beside which nothing is left of a score: they hide keys in the passes, and kernels have to know them too."""

from __future__ import annotations

import torch

SPACING = 8.0
"""Replacing a score by a number is the same as adding the number to it, where the spacing of floats at that number is
at least this much: nothing is left of any usual score, even in rows that are masked everywhere."""


def lost_below(dtype: torch.dtype) -> float:
    """The greatest number that leaves nothing of a score to which it is added in a dtype (see `SPACING`)."""
    return -SPACING / torch.finfo(dtype).eps


def lost_in_ops(dtype: torch.dtype) -> float:
    """The same for scores of operands in a dtype, to which ops add it in float32 at least."""
    return lost_below(torch.promote_types(dtype, torch.float32))
