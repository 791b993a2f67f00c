"""Inline the graphs that a Dynamo graph calls, so that their attention belongs to it.

    invoke_subgraph(graph, name, *operands)            made by `torch.compiler.nested_compile_region`
    tag_activation_checkpoint(graph, *operands)        by `torch.utils.checkpoint`, which computes it once more where
                                                       gradients are needed, and else only calls it

Each call of a graph may then be rewritten differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .control_flow import is_operator

_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a graph, its first argument, that `torch.compiler.nested_compile_region` made."""
    return is_operator(node, ("invoke_subgraph",))


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node calls a graph, its first argument, whose activations are recomputed."""
    return is_operator(node, _CHECKPOINTS)


def has_regions(module: fx.GraphModule) -> bool:
    """Whether a graph has nested regions."""
    return any(map(is_region, module.graph.nodes))


def inline_calls(module: fx.GraphModule) -> None:
    """Inline the nested regions and the checkpoints of a graph without gradients, in place."""
    graph = module.graph
    while calls := [node for node in graph.nodes if is_region(node) or is_checkpoint(node)]:
        for call in calls:
            called: Any = call.args[0]
            operands = call.args[2:] if is_region(call) else call.args[1:]
            results = _inlined(module.get_submodule(called.target), called.target, operands, before=call)
            for user in list(call.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(call)
            if not called.users:
                graph.erase_node(called)
        module.recompile()


def _inlined(called: Any, name: str, operands: Sequence[Any], before: fx.Node) -> Any:
    """Copy a graph's nodes before a node, and return the copied results."""
    given = iter(operands)
    copies: dict[fx.Node, Any] = {}
    for node in called.graph.nodes:
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
