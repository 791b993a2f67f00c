"""Weights whose scale is applied after the product: move the scale to the weight.

    k = (latent @ w.to(dtype)) * scale  =  latent @ (w.to(dtype) * scale)        scale runs over the weight's columns

Only then are keys an up-projection. The scaled weight is not a tensor of the graph: code that reads it multiplies the
two. Weights in few bits have such scales, and so do linear layers whose columns have learned magnitudes (DoRA). A
learned number scales all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..algebra import elementwise, operations
from ..algebra.made import multiplied
from ..algebra.terms import Form, Product, Sum, Term, Unread
from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.shapes import shape_of
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
    """The form of a product times a tensor, if that tensor scales the columns of the product's weight; else None.

    The product may be one of several that are added up, with biases: the tensor then scales all of them.
    """
    operands = [trace[operand] for operand in node.all_input_nodes]
    if len(operands) != 2 or not any(_may_scale(*pair) for pair in (operands, operands[::-1])):
        return None
    whole, forms = factors(trace, node)
    for form, factor in (forms, forms[::-1]):
        scaled = _scaled(form.term, factor.term) if form.term.parts is not None else None
        if scaled is not None:
            return replace(whole, term=replace(whole.term, parts=scaled.parts))
    return None


def _scaled(term: Term, scale: Term) -> Term | None:
    """`term * scale`, if `scale` goes into the weights of its products, and into what else is added; else None."""
    read = Term(replace(term.read, source=Unread(term.read.source)))
    match term.parts:
        case Product(left, right, summed) as parts:
            for weight, other in ((right, left), (left, right)):
                apart = scale.axes.isdisjoint({*other.axes, *summed})
                if apart and scale.axes <= weight.axes and _scales(weight, scale):
                    scaled = Term(multiplied(weight.read, scale.read))
                    left, right = (scaled, other) if weight is left else (other, scaled)
                    return replace(read, parts=replace(parts, left=left, right=right))
        case Sum(terms):
            each = [_scaled(addend, scale) for addend in terms]
            known = tuple(addend for addend in each if addend is not None)
            return replace(read, parts=Sum(known)) if len(known) == len(terms) else None
        case None if not isinstance(term.read.source, Unread):
            return Term(multiplied(term.read, scale.read))
    return None


def _may_scale(product: Form, factor: Form) -> bool:
    """Whether `factor` may differ along nothing but columns of a weight of `product`, judging by its dimensions."""
    dims, rank = factor.dims, min(len(product.dims), len(factor.dims))
    own = factor.term.axes
    scaled = [i for i in range(1, len(dims) + 1) if not own.isdisjoint(dims[-i])]
    return any(
        _input(weight.read.source) is not None
        and all(i <= rank and not weight.axes.isdisjoint(product.dims[-i]) for i in scaled)
        for parts in _products(product.term)
        for weight in (parts.left, parts.right)
    )


def _products(term: Term) -> list[Product]:
    """The products that a term is the sum of, besides other addends."""
    return [addend.parts for addend in elementwise.addends([term]) if isinstance(addend.parts, Product)]


def with_mixed_weights(trace: Forms, node: fx.Node) -> Form | None:
    """The form of `torch.lerp`, `start + weight * (end - start)`, whose weight is a number or scales columns; else
    None."""
    start, end, by = arguments(node)
    if not is_tensor(by) and not isinstance(by, int | float):
        return None
    tensors = [trace[operand] for operand in (start, end, by) if is_tensor(operand)]
    whole = elementwise.pointwise(node, tensors, shape_of(node))
    rank = len(whole.dims)
    labels = [range(rank), *(range(rank - len(form.dims), rank) for form in tensors)]
    (whole, *forms), _ = operations.align([whole, *tensors], labels)
    first, last, *weight = (form.term for form in forms)
    if first.parts is None or last.parts is None:
        return None
    shares = [_scaled(term, weight[0]) if weight else _times(term, float(by)) for term in (first, last)]
    if shares[0] is None or shares[1] is None:
        return None
    parts = Sum(tuple(elementwise.addends((first, _times(shares[0], -1.0), shares[1]))))
    return replace(whole, term=replace(whole.term, parts=parts))


def _times(term: Term, factor: float) -> Term:
    return operations.scaled(Form((), term), factor).term


def factors(trace: Forms, node: fx.Node, operands: Sequence[Form] = ()) -> tuple[Form, list[Form]]:
    """The form of an elementwise function, as a leaf, and those of its operands, or of these, all over common axes."""
    operands = operands or [trace[operand] for operand in node.all_input_nodes if is_tensor(operand)]
    rank = node.meta["val"].dim()
    whole = elementwise.pointwise(node, operands, [1] * rank)
    labels = [range(rank), *(range(rank - len(operand.dims), rank) for operand in operands)]
    (whole, *forms), _ = operations.align([whole, *operands], labels)
    return whole, forms


def _scales(weight: Term, scale: Term) -> bool:
    """Whether one is a weight and the other its scale.

    If the weight has one byte an element, both have to be inputs of the graph. Otherwise the weight has to be a
    matrix, and the scale of its columns may be computed from anything; or, for a single number, a matrix or several.
    """
    matrix = _input(weight.read.source)
    if matrix is None:
        return False
    if matrix.dtype.itemsize == 1 and matrix.dtype != torch.bool:
        return _input(scale.read.source) is not None
    return matrix.dim() == 2 or (matrix.dim() == 3 and not scale.axes)


def _input(source: Any) -> torch.Tensor | None:
    """The value of the graph's input that `source` is, perhaps moved, sliced or cast; None if it is not one."""
    while isinstance(source, fx.Node) and source.target in _MOVES:
        source = source.all_input_nodes[0]
    if not isinstance(source, fx.Node) or source.op not in ("placeholder", "get_attr"):
        return None
    value = source.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
