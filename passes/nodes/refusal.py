"""Refusals: why an attention stays as it is, and where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .source import where


@dataclass
class Refusal(Exception):
    """Why an attention stays as it is.

    `reason` is a sentence that speaks of `node`; `remedy`, if there is one, what would have the attention rewritten;
    `stopped` the node of its operands at which the trace went no further.
    """

    node: fx.Node
    reason: str
    remedy: str = ""
    stopped: fx.Node | None = None

    def __str__(self) -> str:
        return f"{self.reason}, at {where(self.node)}"
