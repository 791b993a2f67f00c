"""Merging partial attentions on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from .._common.launching import launched
from .._common.sizes import always
from .._common.tiles import power_of_two
from .arguments import MergeStates
from .kernel import merge

_ELEMENTS = 4096
"""Numbers of the output per program: 32 per thread."""


def merge_states_triton(x: MergeStates) -> tuple[Tensor, Tensor]:
    """o and lse."""
    o_a, lse_a, o_b, lse_b = (t.contiguous() for t in (x.o_a, x.lse_a, x.o_b, x.lse_b))
    o = torch.empty_like(o_a)
    lse = torch.empty_like(lse_a)
    if not always(lse.numel() == 0):
        constants = constants_of(o.shape[-1])
        grid = (triton.cdiv(lse.numel(), constants["ROWS"]),)
        launched(merge)[grid](
            o_a, lse_a, o_b, lse_b, o, lse, lse.numel(), **constants, num_warps=4, enable_fp_fusion=True
        )
    return o, lse


@cache
def constants_of(columns: int) -> dict[str, int]:
    """The constants that the kernel is specialised to."""
    block = power_of_two(columns)
    return {"V": columns, "BLOCK": block, "ROWS": max(_ELEMENTS // block, 1)}
