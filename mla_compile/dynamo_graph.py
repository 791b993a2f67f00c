"""Copies of Dynamo's graphs that AOTAutograd takes for graphs of Dynamo, and that are one graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

EXAMPLE = "example_value"
"""Where Dynamo keeps the fake value of a node."""


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node of Dynamo's has."""
    return [value for value in pytree.tree_leaves(node.meta.get(EXAMPLE)) if isinstance(value, Tensor)]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed, with all that Dynamo says of the module and its inputs.

    What `fx` leaves behind is where each input is from. Without it no parameter and no cache counts as staying where it
    is: CUDA graphs copy the weights at each replay, and are skipped where a cache is written in place.
    """
    new: Any = fx.GraphModule(module, copy.deepcopy(module.graph))
    new.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        new._param_name_to_source = module._param_name_to_source
    before, after = (graph.find_nodes(op="placeholder") for graph in (module.graph, new.graph))
    for old, input in zip(before, after, strict=True):
        # Dynamo's own, who drops it when it is done: a tensor that it refers to, though weakly, cannot be swapped.
        input.meta.pop("grapharg", None)
        if hasattr(old, "_dynamo_source"):
            input._dynamo_source = old._dynamo_source
    assert isinstance(new, fx.GraphModule)
    return new


def inline_regions(module: fx.GraphModule) -> None:
    """Put what `torch.compiler.nested_compile_region` keeps in graphs of their own where it is called, in place.

    Attention in them is then attention of this graph; of a region that is called several times each may become another.
    """
    graph = module.graph
    while calls := graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        for call in calls:
            region, _, *operands = call.args
            copies = _inlined(module.get_submodule(region.target), region.target, operands, before=call)
            for user in list(call.users):
                user.replace_all_uses_with(copies[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(call)
            if not region.users:
                graph.erase_node(region)
        module.recompile()


def _inlined(region: Any, name: str, operands: list[Any], before: fx.Node) -> Any:
    """Copy a region's code to before a node; its results there."""
    given = iter(operands)
    copies: dict[fx.Node, Any] = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], copies.__getitem__)
        else:
            with before.graph.inserting_before(before):
                copies[node] = before.graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copies[node].target = f"{name}.{node.target}"
    raise AssertionError("a graph without an output")
