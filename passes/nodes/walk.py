"""Walks through a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx


def walk(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """The start nodes and all nodes that are reached from them, the nearest first."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    for node in pending:
        yield node
        for other in onward(node):
            if other not in seen:
                seen.add(other)
                pending.append(other)


def makers(node: fx.Node) -> list[fx.Node]:
    """The operands of a node."""
    return node.all_input_nodes


def users(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes of which a node is an operand."""
    return node.users
