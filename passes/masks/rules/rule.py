"""What a rule is: a function that gives the value of one kind of op's result, at an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from ...nodes.arguments import INTEGERS
from ...nodes.by_op import ByOp
from ...nodes.shapes import size_of
from ..positions import ALWAYS, NEVER, Affine, Index, Value, constant


class Values(Protocol):
    """The values of the tensors of a graph."""

    def __call__(self, node: fx.Node, index: Index, /) -> Value | None:
        """The value of a node's element at an index; None if nothing is known of it."""

    def operand(self, node: fx.Node, index: Index, what: Any, /) -> Value | None:
        """The value of an operand of an elementwise node, broadcast to it."""


Rule: TypeAlias = Callable[[Values, fx.Node, Index], Value | None]
"""The value of a node's element at an index, or None if the operation says nothing about it."""


class Rules(ByOp[Rule]):
    """Rules by their ops."""


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number, rounded to a dtype."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def number_of(number: Any, dtype: torch.dtype) -> Value | None:
    """The value of an element that is a number, in a tensor of a dtype."""
    if isinstance(number, fx.Node):
        return Affine(size_of(number)) if dtype in INTEGERS else None
    if dtype == torch.bool:
        return ALWAYS if number else NEVER
    if dtype in INTEGERS:
        return Affine(int(number))
    return constant(rounded(float(number), dtype)) if dtype.is_floating_point else None
