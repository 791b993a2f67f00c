"""Whole numbers that a graph computes more than once are computed once.

Each rewritten attention brings its own lengths, positions and tables along, the same for all layers of a model: on a
GPU every one of them is a launch. What is no tensor of whole numbers or truth values is left to Inductor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .passes.nodes.arguments import is_repeatable


def merge_same_numbers(graph: fx.Graph) -> int:
    """Let one node stand for all that are the same call with the same arguments; how many it stands in for.

    A result that is returned or written to stays its own: who has two may change one. What was written to is no longer
    what it was.
    """
    own = {_root(node) for node in graph.output_node().all_input_nodes}
    own |= {root for node in graph.nodes for root in _written(node) if root.op == "call_function"}
    changed = set[fx.Node]()
    first: dict[Hashable, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        changed.update(_written(node))
        if not _is_pure(node) or _root(node) in own or not changed.isdisjoint(map(_root, node.all_input_nodes)):
            continue
        one = first.setdefault(_call(node), node)
        if one is not node:
            node.replace_all_uses_with(one)
            graph.erase_node(node)
            count += 1
    return count


def _is_pure(node: fx.Node) -> bool:
    """Whether whole numbers or truth values are all that a call gives, and always the same ones."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
        return False
    return is_repeatable(node.target)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a call may write to, each by the node that made it."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if mutable or isinstance(node.target, torch._ops.HigherOrderOperator):  # what that does is in no schema
        yield from map(_root, node.all_input_nodes)


def _root(node: fx.Node) -> fx.Node:
    """The node that made the memory of a node's result: a view is of its first argument."""
    while isinstance(node.target, torch._ops.OpOverload) and _is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(value.alias_info is not None for value in op._schema.returns)


def _call(node: fx.Node) -> Hashable:
    """What is called with what: 1, 1.0 and True are different."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, tuple((type(leaf), _hashable(leaf)) for leaf in leaves), str(structure)


def _hashable(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, Hashable) else repr(leaf)
