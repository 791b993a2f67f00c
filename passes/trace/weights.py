"""Weights whose scale is applied after the product: move the scale to the weight.

    k = (latent @ w.to(dtype)) * scale  =  latent @ (w.to(dtype) * scale)        scale runs over the weight's columns

Only then are keys an up-projection. The scaled weight is not a tensor of the graph: code that reads it multiplies the
two. Weights in few bits have such scales, and so do linear layers whose columns have learned magnitudes (DoRA).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..algebra import elementwise, operations
from ..algebra.made import multiplied
from ..algebra.terms import Form, Product, Term
from ..nodes.arguments import aten
from .handler import Forms

_MOVES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.permute.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def with_scaled_weight(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a product times a tensor, if that tensor scales the columns of the product's weight; else None."""
    operands = [trace[operand] for operand in node.all_input_nodes]
    if len(operands) != 2 or not any(_may_scale(*pair) for pair in (operands, operands[::-1])):
        return None
    whole, forms = factors(trace, node)
    for form, factor in (forms, forms[::-1]):
        parts, scale = form.term.parts, factor.term
        if not isinstance(parts, Product):
            continue
        for weight, other in ((parts.right, parts.left), (parts.left, parts.right)):
            apart = scale.axes.isdisjoint({*other.axes, *parts.summed})
            if apart and scale.axes <= weight.axes and _scales(weight, scale):
                scaled = Term(multiplied(weight.read, scale.read))
                left, right = (scaled, other) if weight is parts.left else (other, scaled)
                return replace(whole, term=replace(whole.term, parts=replace(parts, left=left, right=right)))
    return None


def _may_scale(product: Form, factor: Form) -> bool:
    """Whether `factor` may differ along nothing but columns of a weight of `product`, judging by its dimensions."""
    parts = product.term.parts
    if not isinstance(parts, Product):
        return False
    dims, rank = factor.dims, min(len(product.dims), len(factor.dims))
    own = factor.term.axes
    scaled = [i for i in range(1, len(dims) + 1) if not own.isdisjoint(dims[-i])]
    return any(
        _input(weight.read.source) is not None
        and all(i <= rank and not weight.axes.isdisjoint(product.dims[-i]) for i in scaled)
        for weight in (parts.left, parts.right)
    )


def factors(trace: Forms, node: fx.Node) -> tuple[Form, list[Form]]:
    """The form of a product of tensors, as a leaf, and the forms of its operands, all over common axes."""
    operands, rank = [trace[operand] for operand in node.all_input_nodes], node.meta["val"].dim()
    whole = elementwise.pointwise(node, operands, [1] * rank)
    labels = [range(rank), *(range(rank - len(operand.dims), rank) for operand in operands)]
    (whole, *forms), _ = operations.align([whole, *operands], labels)
    return whole, forms


def _scales(weight: Term, scale: Term) -> bool:
    """Whether one is a weight and the other its scale.

    If the weight has one byte an element, both have to be inputs of the graph. Otherwise the weight has to be a
    matrix, and the scale of its columns may be computed from anything.
    """
    matrix = _input(weight.read.source)
    if matrix is None:
        return False
    if matrix.dtype.itemsize == 1 and matrix.dtype != torch.bool:
        return _input(scale.read.source) is not None
    return matrix.dim() == 2 and bool(scale.axes)


def _input(source: Any) -> torch.Tensor | None:
    """The value of the graph's input that `source` is, perhaps moved, sliced or cast; None if it is not one."""
    while isinstance(source, fx.Node) and source.target in _MOVES:
        source = source.all_input_nodes[0]
    if not isinstance(source, fx.Node) or source.op not in ("placeholder", "get_attr"):
        return None
    value = source.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
