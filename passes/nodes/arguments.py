"""The arguments of fx nodes, and what kind of op a node is."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments, which fx types as anything that a graph may hold."""
    return node.args


def is_tensor(node: Any) -> bool:
    """Whether `node` is a graph node that holds one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def takes_tensors(node: fx.Node) -> bool:
    """Whether what a node computes depends on any tensor, and not on sizes alone."""
    return any(not isinstance(operand.meta.get("val"), torch.SymInt | int) for operand in node.all_input_nodes)


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node is a function of each element of its broadcast operands by itself, casts included."""
    return is_pointwise(node.target) or node.target is aten._to_copy.default


def is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return arguments(node)[index] if len(arguments(node)) > index else node.kwargs.get(name, default)


def factor_of(node: fx.Node, name: str = "alpha") -> float | None:
    """The number that an op multiplies an operand by on the side, None if the graph does not say it."""
    factor: Any = node.kwargs.get(name, 1)
    return float(factor) if isinstance(factor, int | float) else None
