"""Refusals: why an attention stays as it is, and where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .source import where


@dataclass
class Refusal(Exception):
    """Why an attention stays as it is.

    `reason` is a sentence about `node`. `remedy`, if there is one, says what would get the attention rewritten.
    `stopped` is the node, among those that `node` is computed from, at which the trace stopped.
    """

    node: fx.Node
    reason: str
    remedy: str = ""
    stopped: fx.Node | None = None

    def __str__(self) -> str:
        return f"{self.reason}, at {where(self.node)}"


def from_another_graph(what: str) -> str:
    """The remedy where a graph is given the result of something that would have to be in it."""
    return (
        f"bring {what} into the graph of the attention, which is given its result here (TORCH_LOGS=graph_breaks "
        "shows what separates them; modules of torch.ao.quantization and accelerate's hooks break graphs; branches of "
        "torch.cond and bodies of loops are graphs of their own)"
    )
