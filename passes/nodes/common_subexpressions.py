"""Common subexpressions: nodes of a graph that compute the same thing share one form, however they are spelled."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from .arguments import is_repeatable

_NUMBERS = torch.SymInt, torch.SymFloat, torch.SymBool, int, float


class CommonSubexpressions:
    """Finds nodes that compute the same thing: one op on the same arguments. Ask for the nodes of a graph in order."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, fx.Node] = {}
        self._known: dict[Hashable, fx.Node] = {}
        self._writes = 0

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that computes what `node` computes."""
        first, value = node, node.meta.get("val")
        if isinstance(value, torch.SymInt):  # of whatever tensor it is a size
            first = self._known.setdefault((torch.SymInt, value.node.expr), node)
        elif node.op == "call_function":
            if _is_pure(node):
                with contextlib.suppress(TypeError):  # an argument that is not hashable
                    key = node.target, self._key(node.args), self._key(tuple(node.kwargs.items())), self._writes
                    first = self._known.setdefault(key, node)
            else:
                self._writes += 1  # what is read from here on may differ from what was read before
        self._first[node] = first
        return first

    def _key(self, argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return self._first[argument]
        if isinstance(argument, list | tuple):
            return tuple(self._key(part) for part in argument)
        return type(argument), number_key(argument) if isinstance(argument, float) else argument


def number_key(number: float) -> Hashable:
    """Equal for numbers that are the same in every operation: 0.0 and -0.0 are not."""
    return number, math.copysign(1.0, number)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node writes to nothing: an op, or a number that is computed from numbers."""
    if isinstance(node.target, torch._ops.OpOverload):
        return is_repeatable(node.target)
    return node.target is operator.getitem or isinstance(node.meta.get("val"), _NUMBERS)
