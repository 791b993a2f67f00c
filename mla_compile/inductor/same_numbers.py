"""Compute integers that a graph computes more than once only once.

Each rewritten attention has code for lengths, positions and tables, the same in all layers of a model, and on a GPU
each of these computations is a launch. Tensors that are neither integer nor bool are left to Inductor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..passes.nodes.arguments import is_repeatable, is_view


def merge_same_numbers(graph: fx.Graph) -> int:
    """Merge nodes that are the same call with the same arguments, and return how many were removed.

    Results that are returned or written to are not merged, because a change to one must not change another. Neither are
    calls that read memory which was written to before, as its content has changed.
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
    """Whether the only result of a call is an integer or bool tensor, and the same each time."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
        return False
    return is_repeatable(node.target)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that made the memory to which a call may write."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if mutable or isinstance(node.target, torch._ops.HigherOrderOperator):  # these have no schema to tell
        yield from map(_root, node.all_input_nodes)


def _root(node: fx.Node) -> fx.Node:
    """The node that made the memory of a node's result; views are followed to their first argument."""
    while isinstance(node.target, torch._ops.OpOverload) and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _call(node: fx.Node) -> Hashable:
    """A key for the call and its arguments, in which 1, 1.0 and True differ."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, tuple((type(leaf), _hashable(leaf)) for leaf in leaves), str(structure)


def _hashable(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, Hashable) else repr(leaf)
