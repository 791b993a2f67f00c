"""Where gradients end in a graph whose rewritten code is going to be differentiated."""

from __future__ import annotations

from torch import fx

from .arguments import aten

_ENDED = "mla_gradients_end"


def end_gradients(node: fx.Node) -> None:
    """Mark an `aten.detach`, through which no gradient flows: code that replaces its readers has to read it."""
    assert node.target is aten.detach.default
    node.meta[_ENDED] = True


def ends_gradients(node: fx.Node) -> bool:
    """Whether a node is marked."""
    return _ENDED in node.meta
