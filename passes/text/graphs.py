"""A graph as text: one line for each node, with its dtype and shape, its op and the op's arguments.

    bmm_1: float32[2, 3, 8] = bmm(view_4, permute_2)

A graph has the same text on every machine, for tests to compare and people to read.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx

from .names import short


def graph_text(graph: fx.Graph) -> str:
    """A graph, one line for each node; a graph that an op takes is indented below that op."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: fx.Graph) -> list[str]:
    lines: list[str] = []
    for node in graph.nodes:
        lines.append(_line(node))
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            inner = _inner(operand)
            if inner is not None:
                lines += [f"    {operand.name}", *(f"        {line}" for line in _lines(inner))]
    return lines


def _line(node: fx.Node) -> str:
    kind = _kind(node.meta.get("val"))
    match node.op:
        case "placeholder":
            return f"{node.name}: {kind}"
        case "output":
            return f"return {_value(node.args[0])}"
        case "get_attr":
            return f"{node.name} = {node.target}"
    given = [_value(value) for value in node.args]
    given += [f"{name}={_value(value)}" for name, value in node.kwargs.items()]
    return f"{node.name}: {kind} = {_op(node.target)}({', '.join(given)})"


def _inner(node: fx.Node) -> fx.Graph | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    code = getattr(node.graph.owning_module, str(node.target), None)
    return code.graph if isinstance(code, fx.GraphModule) else None


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _op(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    if target is operator.getitem:
        return "item"
    return str(getattr(target, "__name__", target))


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value == sys.maxsize:
        return "end"
    return short(value)
