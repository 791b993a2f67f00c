"""Handlers of reductions: products and sums that were spelled as others, and a number for each row.

scores = (query.unsqueeze(-2) * key.unsqueeze(-3)).sum(-1)      query @ key.mT
values = torch.stack([latent @ a, latent @ b]).sum(0)           latent @ a + latent @ b
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import fx

from ..algebra import elementwise, operations
from ..algebra.elementwise import MOST_TERMS
from ..algebra.sizes import Unaligned
from ..algebra.terms import Dim, Form, Join, Product, Sum
from ..nodes.arguments import argument, arguments, aten, is_tensor
from ..nodes.shapes import shape_of
from .handler import Forms, Handlers

HANDLERS = Handlers()


@HANDLERS.of(aten.sum.dim_IntList)
def _sum(trace: Forms, node: fx.Node) -> Form:
    """A sum of products of two tensors is their contraction, if both differ along all that it sums over."""
    return _contracted(trace, node) or _added_up(trace, node) or _reduced(trace, node)


@HANDLERS.of(aten.mean.dim)
def _mean(trace: Forms, node: fx.Node) -> Form:
    return _added_up(trace, node) or _reduced(trace, node)


@HANDLERS.of(aten.amax.default, aten.amin.default)
def _reduced(trace: Forms, node: fx.Node) -> Form:
    """A number for each row, which repeats along the other axes along which the rows repeat: as the norms of keys that
    were expanded to all heads."""
    form = trace[arguments(node)[0]]
    return elementwise.pointwise(node, [Form(_kept(node, form.dims), form.term)], shape_of(node))


def _contracted(trace: Forms, node: fx.Node) -> Form | None:
    product, dtype = arguments(node)[0], node.meta["val"].dtype
    if product.target is not aten.mul.Tensor or product.meta["val"].dtype != dtype or not dtype.is_floating_point:
        return None
    factors = arguments(product)
    if not all(is_tensor(factor) and factor.meta["val"].dtype.is_floating_point for factor in factors):
        return None
    rank = len(shape_of(product))
    forms = [_widened(trace[factor], factor, dtype) for factor in factors]
    try:
        (left, right), axes = operations.align(forms, [range(rank - len(form.dims), rank) for form in forms])
    except Unaligned:
        return None
    dims = [axes[i] for i in range(rank)]
    summed = tuple(axis for i in _summed_dims(node, rank) for axis in dims[i])
    if not summed or not {*summed} <= left.term.axes & right.term.axes:
        return None
    return operations.contraction(node, _kept(node, dims), left.term, right.term, summed)


def _added_up(trace: Forms, node: fx.Node) -> Form | None:
    """The sum of the few tensors that were stacked along the dimension which a sum or a mean reduces, or their mean;
    None if it reduces anything else."""
    operand, dtype = arguments(node)[0], node.meta["val"].dtype
    form = trace[operand]
    reduced, pieces = _summed_dims(node, len(form.dims)), _stacked_along(operand)
    if operand.meta["val"].dtype != dtype or len(reduced) != 1 or reduced[0] not in pieces:
        return None
    (dim,), count = reduced, pieces[reduced[0]]
    if not 1 < count <= MOST_TERMS or not isinstance(form.term.parts, Join | Product | Sum):
        return None
    stacked = [operations.select(form, dim, i) for i in range(count)]
    if argument(node, "keepdim"):
        stacked = [Form((*each.dims[:dim], (), *each.dims[dim:]), each.term) for each in stacked]
    if node.target is aten.mean.dim:
        stacked = [operations.scaled(each, 1 / count) for each in stacked]
    return elementwise.add(node, stacked, shape_of(node))


def _stacked_along(node: fx.Node) -> dict[int, int]:
    """How many tensors a node stacks along a dimension, by that dimension; empty if it stacks none."""
    if node.target not in (aten.stack.default, aten.cat.default):
        return {}
    dim, tensors = argument(node, "dim") % len(shape_of(node)), arguments(node)[0]
    one_each = node.target is aten.stack.default or all(shape_of(each)[dim] == 1 for each in tensors)
    return {dim: len(tensors)} if one_each else {}


def _widened(form: Form, node: fx.Node, dtype: Hashable) -> Form:
    return form if node.meta["val"].dtype == dtype else operations.cast(form, dtype)


def _summed_dims(node: fx.Node, rank: int) -> list[int]:
    """The dimensions that a reduction of `rank` dimensions sums over."""
    return sorted({dim % rank for dim in argument(node, "dim") or range(rank)}) if rank else []


def _kept(node: fx.Node, dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The dimensions of a reduction's result, of those that it reduces."""
    dims = tuple(dims)
    reduced, kept = _summed_dims(node, len(dims)), argument(node, "keepdim")
    return tuple(() if i in reduced else axes for i, axes in enumerate(dims) if kept or i not in reduced)
