"""Drop writes to all of a tensor, and with them what the tensor held before.

Before   b = slice_scatter(a, x, 0, 0, 9223372036854775807)       x has the sizes and strides of a, and no other user
After    x

A result that other code has, or an input, stays apart from its copy: both may be returned, and one of them changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ..algebra.sizes import same
from ..nodes.arguments import arguments, aten, is_view
from ..nodes.shapes import shape_of, size_of


def drop_overwritten(graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Replace writes to all of a tensor by what is written, and remove what is then unused.

    New nodes of `replaced` count with the strides of the old ones (see `strides`).
    """
    before = {new: old for old, new in replaced.items()}
    dropped = False
    for node in list(graph.nodes):
        if node.target is not aten.slice_scatter.default:
            continue
        source = arguments(node)[1]
        if _is_used_by(source, node) and _is_all(node, source, before):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped = True
    if dropped:
        graph.eliminate_dead_code()


def _is_used_by(source: fx.Node, user: fx.Node) -> bool:
    """Whether a node, and what it is a view of, is computed for one user alone."""
    while source.op == "call_function" and source.users.keys() == {user}:
        if isinstance(source.target, torch._ops.OpOverload) and not is_view(source.target):
            return True
        if len(source.all_input_nodes) != 1:
            return False
        source, user = source.all_input_nodes[0], source
    return False


def _is_all(node: fx.Node, source: fx.Node, before: Mapping[fx.Node, fx.Node]) -> bool:
    value, own = node.meta["val"], before.get(source, source).meta["val"]
    if own.dtype != value.dtype or own.device != value.device:
        return False
    strides = zip(own.stride(), value.stride(), strict=True)
    return all(same(a, b) for a, b in zip(shape_of(source), shape_of(node), strict=True)) and all(
        same(size_of(a), size_of(b)) for a, b in strides
    )
