"""Products with weights in int8 that Inductor has a kernel for, and finds by how they are written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..passes.nodes.arguments import RESHAPES, aten

_TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


def products_with_int8(graph: fx.Graph) -> frozenset[fx.Node]:
    """The products of two matrices in `linear(x, weight.to(bfloat16)) * scales`: `_register_woq_lowerings` of Inductor.

    `x` and `scales` are bfloat16. Where rows are of one dim, the weight is transposed before it is cast.
    """
    found = graph.find_nodes(op="call_function", target=aten.mm.default)
    return frozenset(product for product in found if _is_scaled(product))


def _is_scaled(product: fx.Node) -> bool:
    rows, matrix = product.args
    viewed = _only_user(product, RESHAPES)
    scaled = _only_user(viewed or product, (aten.mul.Tensor,))
    if scaled is None or scaled.args[0] is not (viewed or product):
        return False
    steps = (_TRANSPOSES, (aten._to_copy.default,)) if viewed else ((aten._to_copy.default,), _TRANSPOSES)
    return _dtypes(rows, scaled.args[1]) == {torch.bfloat16} and _dtypes(_through(matrix, steps)) == {torch.int8}


def _only_user(node: fx.Node, targets: Collection[Any]) -> fx.Node | None:
    user, *others = node.users
    return user if not others and user.target in targets else None


def _through(node: Any, steps: Collection[Collection[Any]]) -> Any:
    """What a node is made of by those steps, the last first; None where it has another reader, or others made it."""
    for targets in steps:
        if not isinstance(node, fx.Node) or node.target not in targets or len(node.users) != 1:
            return None
        node = node.args[0]
    return node


def _dtypes(*values: Any) -> set[torch.dtype | None]:
    nodes = (value.meta.get("val") if isinstance(value, fx.Node) else None for value in values)
    return {value.dtype if isinstance(value, torch.Tensor) else None for value in nodes}
