"""Where a node comes from in the user's source, and refusals that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?(.*)')


@dataclass(frozen=True)
class Frame:
    """One line of the user's source: `code` at `path:line` in `function`."""

    path: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def frames(node: fx.Node) -> list[Frame]:
    """The stack of user code that made a node, outermost first; empty if the graph does not say."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [Frame(path, int(line), function.rstrip(","), code.strip()) for path, line, function, code in found]


def common_frame(node: fx.Node, others: Iterable[fx.Node]) -> Frame | None:
    """The line at which the innermost function that made all the nodes made `node`: the attention's line in the model,
    not in the library function that the model calls for it."""
    own = frames(node)
    depth = len(own)
    for other in others:
        stack = frames(other)
        shared = 0
        while shared < min(len(own), len(stack)):
            a, b = own[shared], stack[shared]
            if (a.path, a.function) != (b.path, b.function):
                break
            shared += 1
            if a != b:
                break
        depth = min(depth, shared) if shared else depth
    return own[depth - 1] if own else None


def where(node: fx.Node) -> str:
    """A node in words: its op, its name and its source line."""
    op = getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op
    stack = frames(node)
    return f"`{node.name}` ({op}{f', {stack[-1]}' if stack else ''})"


@dataclass
class Refusal(Exception):
    """Why an attention stays as it is: a sentence, and the node that it speaks of."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}, at {where(self.node)}"
