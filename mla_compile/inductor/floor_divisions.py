"""Floor divisions of positions on a CPU, in a form by which Inductor splits no loop.

    q = trunc(x / n),   floor(x / n) = q - (1 if q n > x else 0)

Inductor knows an `arange` divided by a number as an expression of the loop's index. Its code for CPUs splits such a
loop into one of n steps within another (`CppScheduling.try_loop_split` of torch 2.11 to 2.15, for n above 8), and
leaves out what remains if n does not divide the loop: of `pages[:, positions // page_size]`, the last keys. It takes
no truncated quotient for such an expression.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..passes.nodes.arguments import INTEGERS

_NEVER_SPLIT = 8
"""Loops are not split by numbers up to this one."""


def floor_division(x: Any, n: Any, *, rounding_mode: str | None) -> Any:
    """`aten.div.Tensor_mode` of integers on a CPU by a constant, rounded down; NotImplemented for all others."""
    integers = isinstance(x, Tensor) and x.dtype in INTEGERS and x.device.type == "cpu"
    if not integers or rounding_mode != "floor" or type(n) is not int or n <= _NEVER_SPLIT:
        return NotImplemented
    quotient = torch.div(x, n, rounding_mode="trunc")
    return quotient - (quotient * n > x).to(x.dtype)
