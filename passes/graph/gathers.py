"""Remove gathers of other ranks' tensors that nothing uses any more. To fx, collectives have side effects."""

from __future__ import annotations

from torch import fx

from ..nodes.arguments import arguments
from ..trace.collectives import WAIT, gather_behind


def waits_for_gathers(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that hold the results of gathers, where these results are used."""
    waits = graph.find_nodes(op="call_function", target=WAIT)
    return [node for node in waits if node.users and gather_behind(node) is not None]


def remove_unused(waits: list[fx.Node]) -> None:
    """Remove the gathers whose results are no longer used. All ranks remove the same, as all have the same graph."""
    for wait in waits:
        if not wait.users:
            (gather,) = arguments(wait)
            wait.graph.erase_node(wait)
            if not gather.users:
                gather.graph.erase_node(gather)
