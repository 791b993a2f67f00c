"""Gathers of other ranks' tensors die with what was made of them: to fx a collective is more than its result."""

from __future__ import annotations

from torch import fx

from ..nodes.arguments import arguments
from ..trace.collectives import WAIT, gather_behind


def waits_for_gathers(graph: fx.Graph) -> list[fx.Node]:
    """Of the gathers whose results something is made of, the nodes that hold the results."""
    waits = graph.find_nodes(op="call_function", target=WAIT)
    return [node for node in waits if node.users and gather_behind(node) is not None]


def remove_unused(waits: list[fx.Node]) -> None:
    """Remove those gathers of which nothing is made any more. All ranks do, as all have the same graph."""
    for wait in waits:
        if not wait.users:
            (gather,) = arguments(wait)
            wait.graph.erase_node(wait)
            if not gather.users:
                gather.graph.erase_node(gather)
