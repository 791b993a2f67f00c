"""Pass tensors rather than views to loops where possible, and never views as another dtype.

Before   b = squeeze(a, 0), c = unsqueeze(b, 0), e = view(d, uint8), while_loop(..., (c, e))
After    while_loop(..., (a, d)), whose graphs view d as uint8

For a view with the layout of its base, or as another dtype, AOTInductor of torch 2.13 makes one handle before the loop.
Each graph that reads the handle frees it, so that the second reads freed memory. For other views, each read gets a
handle of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..aliases import share_memory
from ..passes.nodes.arguments import aten
from .loop_writes import write_in_own_dtype

_IN_ORDER = (
    aten.clone.default,  # Inductor omits copies that change neither dtype nor strides
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
)
"""Ops that keep all elements, and their order."""


def straighten_loop_operands(module: fx.GraphModule) -> None:
    """Replace each operand of every `while_loop`, at any depth, by the tensor that it is a view or no-op copy of, if
    that has the same sizes and strides.

    An operand that views a tensor as another dtype becomes that tensor, which the loop's graphs then view.
    """
    for part in list(module.modules()):
        if not isinstance(part, fx.GraphModule):
            continue
        loops = part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.while_loop)
        if loops:
            write_in_own_dtype(part.graph)
        for loop in loops:
            _straighten(loop)
            _view_inside(part, loop)
            _straighten(loop)
        if loops:
            part.graph.eliminate_dead_code()
            part.recompile()


def _straighten(loop: fx.Node) -> None:
    *first, operands = loop.args
    assert isinstance(operands, list | tuple)
    loop.args = (*first, tuple(_straight(operand, operands) for operand in operands))


def _view_inside(module: fx.GraphModule, loop: fx.Node) -> None:
    """Pass a tensor instead of its view as another dtype, and let the loop's graphs make the view."""
    *graphs, carried, operands = loop.args
    assert isinstance(carried, list | tuple)
    assert isinstance(operands, list | tuple)
    for i, view in enumerate(operands):
        if not isinstance(view, fx.Node) or view.target != aten.view.dtype:
            continue
        viewed = view.all_input_nodes[0]
        for graph in graphs:
            assert isinstance(graph, fx.Node)
            turn = module.get_submodule(str(graph.target))
            assert isinstance(turn, fx.GraphModule)
            placeholder = turn.graph.find_nodes(op="placeholder")[len(carried) + i]
            if placeholder.users:
                first = next(node for node in turn.graph.nodes if node.op != "placeholder")
                with turn.graph.inserting_before(first):
                    inside = turn.graph.call_function(aten.view.dtype, (placeholder, view.args[1]))
                inside.meta = dict(placeholder.meta)
                placeholder.replace_all_uses_with(inside, delete_user_cb=lambda user, kept=inside: user is not kept)
                turn.recompile()
            placeholder.meta = placeholder.meta | {"val": viewed.meta["val"]}
        operands = (*operands[:i], viewed, *operands[i + 1 :])
    loop.args = (*graphs, carried, operands)


def _straight(operand: Any, operands: Sequence[Any]) -> Any:
    """The furthest origin of an operand with the same layout that shares no memory with another operand, as a loop
    accepts no operands that do."""
    if not isinstance(operand, fx.Node) or not isinstance(operand.meta["val"], Tensor):
        return operand
    others = [n.meta["val"] for n in operands if isinstance(n, fx.Node) and n is not operand]
    others = [value for value in others if isinstance(value, Tensor)]
    straight = operand
    for origin in _origins(operand):
        value = origin.meta["val"]
        if _same_layout(operand.meta["val"], value) and not any(share_memory(value, o) for o in others):
            straight = origin
    return straight


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that hold all elements of a node in their order, and of which it is a view or a copy, nearest first."""
    while (origin := _origin_in_order(node) or _same_view(node)) is not None:
        yield origin
        node = origin


def _origin_in_order(node: fx.Node) -> fx.Node | None:
    if node.target not in _IN_ORDER:
        return None
    (origin,) = node.all_input_nodes[:1]
    return origin if origin.meta["val"].dtype == node.meta["val"].dtype else None


def _same_view(node: fx.Node) -> fx.Node | None:
    """The nearest tensor that a node is a view of and that has its layout: both are the same elements of one memory."""
    origin = node
    while _views_its_first_operand(origin.target):
        (origin,) = origin.all_input_nodes[:1]
        if _same_layout(node.meta["val"], origin.meta["val"]):
            return origin
    return None


def _views_its_first_operand(target: Any) -> bool:
    """Whether what an op returns is a view of its first operand, and not the operand itself, changed in place."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.arguments:
        return False
    first = target._schema.arguments[0].alias_info
    return first is not None and not first.is_write


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether code generated for one of two tensors with equal values also works for the other."""
    if (a.dtype, a.dim()) != (b.dtype, b.dim()) or not statically_known_true(a.storage_offset() == b.storage_offset()):
        return False
    axes = zip(a.shape, a.stride(), b.shape, b.stride(), strict=True)
    return all(
        statically_known_true(size == n) and (statically_known_true(size == 1) or statically_known_true(stride == m))
        for size, stride, n, m in axes
    )
