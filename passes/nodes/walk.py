"""Ways through a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx


def walk(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Nodes and all that is reached from them, the nearest first."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    for node in pending:
        yield node
        for other in onward(node):
            if other not in seen:
                seen.add(other)
                pending.append(other)


def makers(node: fx.Node) -> list[fx.Node]:
    """What a node is made of at once."""
    return node.all_input_nodes


def users(node: fx.Node) -> Iterable[fx.Node]:
    """What is made of it at once."""
    return node.users
