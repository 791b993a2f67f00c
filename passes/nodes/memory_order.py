"""In which order the dimensions of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .shapes import hints_of, size_of


def order_of(value: Tensor) -> tuple[int, ...]:
    """The dimensions by decreasing stride, for present sizes; no guard is added.

    Of two with equal strides, one with a single element counts as the inner one.
    """
    given: tuple[int | torch.SymInt, ...] = value.stride()
    strides = [size_of(stride) for stride in given]
    symbols = [stride for stride in given if isinstance(stride, torch.SymInt)]
    hints = hints_of(strides, symbols[0].node.shape_env) if symbols else {}
    keys = [
        (int(sympy.sympify(stride).subs(hints)), not statically_known_true(size == 1))
        for stride, size in zip(strides, value.shape, strict=True)
    ]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__, reverse=True))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that brings dimensions in this order back to where they were."""
    return [order.index(dim) for dim in range(len(order))]
