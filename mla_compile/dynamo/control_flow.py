"""Handle the graphs within a graph: the branches of `torch.cond` and the bodies of `while_loop`, `scan` and `map`.

    cond(predicate, true_graph, false_graph, operands)      each a functional graph of its own

Attention in them is rewritten like that of the surrounding graph. The branches of a `cond` must agree in the layouts of
their results, and a loop body's results must have the layouts of its inputs, so results keep their layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch import _prims_common as prims
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from mla_compile.passes.nodes.memory_order import inverse, order_of

from .graph import copied

_OPERATORS = {"cond", "while_loop", "scan", "map_impl"}
"""The names of torch's operators whose graphs may be changed."""


def is_control_flow(node: fx.Node) -> bool:
    """Whether a node runs other graphs of its module."""
    return is_operator(node, _OPERATORS)


def has_apart(module: fx.GraphModule) -> bool:
    """Whether some of a graph is in control flow, or in `nested_compile_region`s, each of which is compiled once."""
    return any(is_operator(node, _OPERATORS | {"invoke_subgraph"}) for node in module.graph.nodes)


def is_operator(node: fx.Node, names: Collection[str]) -> bool:
    """Whether a node is one of the higher-order operators of these names."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in names


def parts(module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The graphs that a graph's control flow runs, by name; nested ones as `true_graph_0.while_loop_body_0`."""
    found = dict[str, fx.GraphModule]()
    for name, part in _own_parts(module):
        found |= {name: part} | {f"{name}.{inner}": within for inner, within in parts(part).items()}
    return found


def _own_parts(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    for node in module.graph.nodes:
        for operand in node.all_input_nodes if is_control_flow(node) else ():
            part = getattr(module, str(operand.target), None) if operand.op == "get_attr" else None
            if isinstance(part, fx.GraphModule):
                yield str(operand.target), part


def located(module: fx.GraphModule, name: str) -> tuple[fx.GraphModule, str]:
    """The graph that holds a node named as in a report (`true_graph_0.softmax`), and the node's name in that graph."""
    part, _, own = name.rpartition(".")
    return parts(module)[part] if part else module, own


def copy_parts(module: fx.GraphModule) -> None:
    """Replace the parts of a graph by copies that may be changed."""
    for name, part in list(_own_parts(module)):
        new = copied(part)
        copy_parts(new)
        setattr(module, name, new)


def code_of(module: fx.GraphModule) -> str:
    """The text of a graph and its parts."""
    return "\n".join([module.code, *(part.code for part in parts(module).values())])


@dataclass(frozen=True)
class Layout:
    """The memory layout of a result."""

    order: tuple[int, ...]
    """Its dimensions by decreasing stride."""
    strides: tuple[int, ...] | None
    """None if a stride is a symbol."""
    contiguous: bool
    """Whether strides are those of a contiguous tensor whose dimensions have this order, of one element or not."""
    told: bool
    """Whether the other fields determine the layout. They do not if strides are symbols, a dimension has one element
    and a stride of its own, and the dimensions are not in order."""


Layouts = list[Layout | None]
"""The layout of each result; None for a result with gaps or overlaps."""


def layouts_of(part: fx.GraphModule) -> Layouts:
    """The layouts of a part's results."""
    return [_layout(result.meta.get("val")) for result in _results(part)]


def lay_out(part: fx.GraphModule, layouts: Layouts) -> None:
    """Give the results of a part that was changed the layouts that they had before, in place."""
    output = part.graph.output_node()
    laid_out: dict[fx.Node, fx.Node] = {}
    for result, layout in zip(_results(part), layouts, strict=True):
        if layout is not None and result not in laid_out:
            with part.graph.inserting_before(output):
                wanted = layout.order, layout.strides, layout.contiguous
                laid_out[result] = part.graph.call_function(_laid_out, (result, *wanted))
    for before, after in laid_out.items():
        after.meta = dict(before.meta)
        output.replace_input_with(before, after)
    part.recompile()


def _results(part: fx.GraphModule) -> list[fx.Node]:
    return [result for result in pytree.tree_leaves(part.graph.output_node().args[0]) if isinstance(result, fx.Node)]


def _layout(value: Any) -> Layout | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    if not prims.is_non_overlapping_and_dense_or_false(value):
        return None
    order = order_of(value)
    symbolic = any(isinstance(stride, torch.SymInt) for stride in value.stride())
    single = any(statically_known_true(size == 1) for size in value.shape)
    known = None if symbolic else tuple(int(stride) for stride in value.stride())
    contiguous = all(map(_equal, value.stride(), _contiguous_strides(value, order)))
    in_order = order == tuple(range(len(order)))
    return Layout(order, known, contiguous, known is not None or contiguous or not single or in_order)


def _equal(first: int | torch.SymInt, second: int | torch.SymInt) -> bool:
    return statically_known_true(first == second)


def _contiguous_strides(value: Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size whose dimensions have this order."""
    strides = prims.make_contiguous_strides_for([value.shape[dim] for dim in order])
    return tuple(strides[place] for place in inverse(order))


def _laid_out(result: Tensor, order: tuple[int, ...], strides: tuple[int, ...] | None, contiguous: bool) -> Tensor:
    """The same values in a given layout. Strides of dimensions with one element count too, and Inductor keeps them only
    where they are given explicitly."""
    if contiguous:
        strides = _contiguous_strides(result, order)
    if strides is not None and all(map(_equal, strides, result.stride())):
        return result
    ordered = result.permute(order)
    if strides is not None:
        return ordered.reshape(-1).as_strided(result.shape, strides)
    return ordered.contiguous().permute(inverse(order))
