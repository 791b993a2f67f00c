"""Write to a tensor in its own dtype, not to a view of it as another.

Before   b = view(a, uint8), c = index_put(b, indices, source)
After    d = index_put(a, indices, view(source, float8)), c = view(d, uint8)

Inductor does such a write in place, and then has the view's handle for the result. To loops it is as a view as another
dtype is (`loop_operands`), which `d` is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..passes.nodes.arguments import aten

_SOURCES = {
    aten.copy.default: 1,
    aten.index_copy.default: 3,
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten.scatter.src: 3,
    aten.select_scatter.default: 1,
    aten.slice_scatter.default: 1,
}
"""Ops that write into their first argument, and the place of the argument that they write, element for element."""


def write_in_own_dtype(graph: fx.Graph) -> None:
    """Turn each write to a view as another dtype of the same size into one to the tensor that is viewed."""
    for write in graph.nodes:
        if write.target not in _SOURCES or not _sets_elements(write):
            continue
        view, place = _itself(write.args[0]), _SOURCES[write.target]
        if view.target != aten.view.dtype:
            continue
        viewed, source = view.all_input_nodes[0], write.args[place]
        dtype = viewed.meta["val"].dtype
        if dtype.itemsize != view.meta["val"].dtype.itemsize or not isinstance(source, fx.Node):
            continue
        if source.meta["val"].dtype != view.meta["val"].dtype:  # `copy` converts
            continue
        with graph.inserting_before(write):
            own = _viewed_as(graph, source, dtype)
            arguments = (viewed, *write.args[1:place], own, *write.args[place + 1 :])
            direct = graph.call_function(write.target, arguments, write.kwargs)
            direct.meta = write.meta | {"val": write.meta["val"].view(dtype)}
            again = _viewed_as(graph, direct, view.meta["val"].dtype)
        write.replace_all_uses_with(again)
        graph.erase_node(write)
        for back in list(_views_of(again)):
            if back.args[1] == dtype:
                back.replace_all_uses_with(direct)


def _sets_elements(write: fx.Node) -> bool:
    """Whether a write sets elements, and does not add to them."""
    return not (len(write.args) > 3 and write.target in _ADDING and write.args[3])


_NAMES = (aten.alias.default, aten.detach.default)
"""Ops whose result is their argument."""
_ADDING = (aten.index_put.default, aten._unsafe_index_put.default)
"""Writes whose fourth argument, `accumulate`, has them add."""


def _itself(node: Any) -> fx.Node:
    """The tensor of which a node is another name."""
    assert isinstance(node, fx.Node)
    while node.target in _NAMES:
        (node,) = node.all_input_nodes
    return node


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Views of a node as other dtypes."""
    for user in node.users:
        if user.target in _NAMES:
            yield from _views_of(user)
        elif user.target == aten.view.dtype:
            yield user


def _viewed_as(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A node's elements as those of another dtype of the same size."""
    view = graph.call_function(aten.view.dtype, (node, dtype))
    view.meta = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
    view.meta["val"] = node.meta["val"].view(dtype)
    return view
