"""Where a node comes from in the user's source, and refusals that name it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def location(node: fx.Node) -> str | None:
    """`file:line` of the innermost user frame that made a node, None if the graph does not say."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    path, line, _ = frames[-1]
    return f"{path}:{line}"


def code(node: fx.Node) -> str:
    """The user's line of source that made a node, empty if the graph does not say."""
    lines = [line for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines and not _FRAME.search(lines[-1]) else ""


def where(node: fx.Node) -> str:
    """A node in words: its op, its name and its source line."""
    op = getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op
    place = location(node)
    return f"`{node.name}` ({op}{f', {place}' if place else ''})"


@dataclass
class Refusal(Exception):
    """Why an attention stays as it is: a sentence, and the node that it speaks of."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}, at {where(self.node)}"
