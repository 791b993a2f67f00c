"""Operands of loops that are tensors themselves where they can be, and not views that end where they began.

Before   b = squeeze(a, 0), c = unsqueeze(b, 0), while_loop(..., (c,))
After    while_loop(..., (a,))

AOTInductor of torch 2.13 makes such a `c` one handle before the loop, and each graph that reads it frees it: the second
reads freed memory. A view that differs from what it views gets a handle of its own at each reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._unsafe_view.default, aten._to_copy.default)
"""Copies that Inductor leaves out where they change neither dtype nor strides."""
_torch_c: Any = torch._C  # `_is_alias_of` is not in its stubs


def straighten_loop_operands(module: fx.GraphModule) -> None:
    """Hand every `while_loop`, at any depth, the tensor that its operand is: same values, sizes and strides."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        loops = part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.while_loop)
        for loop in loops:
            *first, operands = loop.args
            loop.args = (*first, tuple(_straight(operand, operands) for operand in operands))
        if loops:
            part.graph.eliminate_dead_code()
            part.recompile()


def _straight(operand: Any, operands: tuple[Any, ...]) -> Any:
    """The furthest tensor that the operand is, unless it shares memory with another operand: a loop takes none such."""
    if not isinstance(operand, fx.Node) or not isinstance(operand.meta["val"], Tensor):
        return operand
    others = [n.meta["val"] for n in operands if isinstance(n, fx.Node) and n is not operand]
    others = [value for value in others if isinstance(value, Tensor)]
    straight = operand
    for origin in _origins(operand):
        value = origin.meta["val"]
        if _same_layout(operand.meta["val"], value) and not any(_torch_c._is_alias_of(value, o) for o in others):
            straight = origin
    return straight


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """What a node is a view or a copy of, nearest first."""
    while isinstance(node.target, torch._ops.OpOverload) and (node.target in _COPIES or _is_view(node.target)):
        (node,) = node.all_input_nodes[:1]
        yield node


def _is_view(op: torch._ops.OpOverload) -> bool:
    first = op._schema.arguments[0].alias_info if op._schema.arguments else None
    return first is not None and not first.is_write


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same values are the same to code that was generated for one of them."""
    if (a.dtype, a.dim()) != (b.dtype, b.dim()) or not statically_known_true(a.storage_offset() == b.storage_offset()):
        return False
    axes = zip(a.shape, a.stride(), b.shape, b.stride(), strict=True)
    return all(
        statically_known_true(size == n) and (statically_known_true(size == 1) or statically_known_true(stride == m))
        for size, stride, n, m in axes
    )
