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
