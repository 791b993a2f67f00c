"""The arguments of fx nodes, and what kind of op a node is."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
INTEGERS = (torch.int64, torch.int32)
"""The dtypes of positions and indices."""
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
"""Ops that give the same elements in the same order another shape."""
NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
"""Ops that negate a bool tensor."""


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments as `Any`: fx types them as anything that a graph may hold."""
    return node.args


def is_tensor(node: Any) -> bool:
    """Whether `node` is a graph node that holds one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def takes_tensors(node: fx.Node) -> bool:
    """Whether what a node computes depends on any tensor, and not on sizes alone."""
    return any(not isinstance(operand.meta.get("val"), torch.SymInt | int) for operand in node.all_input_nodes)


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node is an elementwise function of broadcast operands, casts included."""
    return is_pointwise(node.target) or node.target is aten._to_copy.default


def is_repeatable(op: torch._ops.OpOverload) -> bool:
    """Whether an op always gives the same result for the same operands, and writes to none of them."""
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether what an op returns may share memory with an operand."""
    return any(result.alias_info is not None for result in op._schema.returns)


def is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the op's schema, given by position or keyword; its default if it is not given."""
    place, default = _parameters(node.target)[name]
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, default)


def all_arguments(node: fx.Node, op: torch._ops.OpOverload) -> dict[str, Any]:
    """All arguments of a node by their names in the schema of `op`, whose parameters the function it calls shares."""
    parameters = _parameters(op)
    return {name: default for name, (_, default) in parameters.items()} | (
        dict(zip(parameters, node.args, strict=False)) | node.kwargs
    )


@cache
def _parameters(op: Any) -> dict[str, tuple[int, Any]]:
    """Place and default of each parameter. Cached: torch's `normalize_function` binds all of them at each call."""
    return {p.name: (i, p.default_value) for i, p in enumerate(op._schema.arguments)}


def factor_of(node: fx.Node, name: str = "alpha") -> float | None:
    """The number, argument `name`, by which an op scales one of its operands; None if it is not a constant of the
    graph."""
    factor = argument(node, name)
    return float(factor) if isinstance(factor, int | float) else None
