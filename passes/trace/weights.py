"""Weights in few bits whose scale comes after the product: see it on the weight.

    k = (latent @ w.to(dtype)) * scale  =  latent @ (w.to(dtype) * scale)        scale runs over the weight's columns

Only so are keys an up-projection again. No graph has that weight as a tensor: whoever reads it multiplies the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..algebra import operations
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


def dequantized(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a product times a tensor, if that scales the weight in few bits that the product is made with."""
    operands = node.all_input_nodes
    if len(operands) != 2 or not any(isinstance(trace[o].term.parts, Product) for o in operands):
        return None
    whole, forms = factors(trace, node)
    for form, factor in (forms, forms[::-1]):
        parts, scale = form.term.parts, factor.term
        if not isinstance(parts, Product) or not _is_weight(scale.read.source):
            continue
        for weight, other in ((parts.right, parts.left), (parts.left, parts.right)):
            apart = scale.axes.isdisjoint({*other.axes, *parts.summed})
            if apart and scale.axes <= weight.axes and _is_weight(weight.read.source, in_few_bits=True):
                scaled = Term(operations.multiplied(weight.read, scale.read))
                left, right = (scaled, other) if weight is parts.left else (other, scaled)
                return replace(whole, term=replace(whole.term, parts=replace(parts, left=left, right=right)))
    return None


def factors(trace: Forms, node: fx.Node) -> tuple[Form, list[Form]]:
    """The form of a product of tensors as a leaf, and those of its operands, over common axes."""
    operands, rank = [trace[operand] for operand in node.all_input_nodes], node.meta["val"].dim()
    whole = operations.pointwise(node, operands, [1] * rank)
    labels = [range(rank), *(range(rank - len(operand.dims), rank) for operand in operands)]
    (whole, *forms), _ = operations.align([whole, *operands], labels)
    return whole, forms


def _is_weight(source: Any, in_few_bits: bool = False) -> bool:
    """Whether a tensor is an input of the graph, perhaps moved and cast; and, if asked, of a dtype of one byte."""
    while isinstance(source, fx.Node) and source.target in _MOVES:
        source = source.all_input_nodes[0]
    if not isinstance(source, fx.Node) or source.op not in ("placeholder", "get_attr"):
        return False
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return not in_few_bits or (value.dtype.itemsize == 1 and value.dtype != torch.bool)
