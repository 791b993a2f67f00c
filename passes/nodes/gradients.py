"""Where gradients end, or are not torch's, in a graph whose rewritten code is going to be differentiated."""

from __future__ import annotations

from torch import fx

from .arguments import aten
from .refusal import Refusal
from .source import where

_ENDED = "mla_gradients_end"
_OWN = "mla_own_gradients"


def end_gradients(node: fx.Node) -> None:
    """Mark an `aten.detach`, through which no gradient flows: code that replaces its readers has to read it."""
    assert node.target is aten.detach.default
    node.meta[_ENDED] = True


def ends_gradients(node: fx.Node) -> bool:
    """Whether a node is marked."""
    return _ENDED in node.meta


def give_own_gradients(node: fx.Node, function: fx.Node) -> None:
    """Mark an input that another graph has as the result of `function`, which has a gradient of its own."""
    node.meta[_OWN] = where(function)
    if (stack := function.meta.get("stack_trace")) is not None:
        node.meta["stack_trace"] = stack


def own_gradients(node: fx.Node, stopped: fx.Node | None) -> Refusal | None:
    """The refusal of the attention at `node` if the trace stopped at a marked input; None if it did not."""
    if stopped is None or _OWN not in stopped.meta:
        return None
    reason = f"expected operations whose gradients are torch's own, found {stopped.meta[_OWN]}"
    return Refusal(node, reason, "write the function with torch's operations, or apply it to the latent", stopped)
