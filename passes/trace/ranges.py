"""Indices that count up by one: `arange`, perhaps plus a number."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..algebra.sizes import Size, total
from ..nodes.arguments import argument, arguments, aten, factor_of, is_tensor
from ..nodes.shapes import size_of


def first_of(node: Any) -> Size | None:
    """The first number of a tensor whose numbers go up by one; None if it is not known to be such a tensor."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    match node.target:
        case aten.arange.default:
            return 0
        case aten.arange.start:
            return _whole(arguments(node)[0])
        case aten.arange.start_step if argument(node, "step") == 1:
            return _whole(arguments(node)[0])
        case aten.add.Tensor if factor_of(node) == 1:
            a, b = arguments(node)[:2]
            first, more = (first_of(a), _whole(b)) if is_tensor(a) else (first_of(b), _whole(a))
            return None if first is None or more is None else total([first, more])
    return None


def _whole(number: Any) -> Size | None:
    known = isinstance(number, int) or (isinstance(number, fx.Node) and not is_tensor(number))
    return size_of(number) if known else None
