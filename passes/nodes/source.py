"""Where a node comes from in the user's source, and what a message calls it."""

from __future__ import annotations

import re
from collections import deque
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
    """The line of source, in the innermost function that made all of the nodes, at which `node` was made.

    This is the attention's line in the model, rather than one in a library function that the model calls for it.
    """
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
    """A node in words: its name, its op and its source line."""
    op = getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op
    stack = frames(node)
    return f"`{node.name}` ({op}{f', {stack[-1]}' if stack else ''})"


def trail(node: fx.Node, end: fx.Node) -> tuple[str, ...]:
    """The lines of source from `node` back to `end`, which it is computed from, on the shortest way.

    If the graph does not say a line, the op stands for it. Empty if there is no such way.
    """
    towards: dict[fx.Node, fx.Node] = {}
    pending = deque([node])
    while pending and end not in towards and end is not node:
        user = pending.popleft()
        for operand in user.all_input_nodes:
            if operand not in towards:
                towards[operand] = user
                pending.append(operand)
    if end is not node and end not in towards:
        return ()
    steps = [end]
    while steps[-1] is not node:
        steps.append(towards[steps[-1]])
    return tuple(dict.fromkeys(_line(step) for step in reversed(steps)))


def _line(node: fx.Node) -> str:
    stack = frames(node)
    return f"`{stack[-1].code}` ({stack[-1]})" if stack else where(node)
