"""Handlers of arithmetic: products, sums, scales and casts."""

from __future__ import annotations

from torch import fx

from ..algebra import operations
from ..algebra.terms import Form, Unread
from ..nodes.arguments import argument, arguments, aten, factor_of, is_tensor
from ..nodes.shapes import shape_of, size_of
from .fp8 import dequantized_read, in_fp8
from .handler import Forms, Handlers, pointwise
from .weights import dequantized

HANDLERS = Handlers()


@HANDLERS.of(aten._to_copy.default)
def _cast(trace: Forms, node: fx.Node) -> Form:
    source = arguments(node)[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if node.meta["val"].device != source.meta["val"].device:
        return operations.leaf(node, shape_of(node))
    if before == after:
        return trace[source]
    if not (before.is_floating_point and after.is_floating_point):
        return pointwise(trace, node)
    return operations.cast(trace[source], after)


@HANDLERS.of(aten.mm.default)
def _mm(trace: Forms, node: fx.Node) -> Form:
    return operations.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [], (1, 0))


@HANDLERS.of(aten.bmm.default)
def _bmm(trace: Forms, node: fx.Node) -> Form:
    return operations.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [(0, 0)], (2, 1))


@HANDLERS.of(aten.addmm.default)
def _addmm(trace: Forms, node: fx.Node) -> Form:
    bias, left, right = (trace[operand] for operand in arguments(node))
    alpha, beta = factor_of(node), factor_of(node, "beta")
    if alpha is None or not beta:  # a bias times 0 is nothing even if it is NaN
        return operations.leaf(node, shape_of(node))
    product = _times(operations.contract(Unread(node), left, right, [], (1, 0)), alpha)
    return operations.add(node, [product, _times(bias, beta)], shape_of(node))


@HANDLERS.of(aten.add.Tensor, aten.sub.Tensor)
def _add(trace: Forms, node: fx.Node) -> Form:
    a, b = arguments(node)[:2]
    factor = factor_of(node)
    known = is_tensor(a) and is_tensor(b) and any(trace[o].term.parts is not None for o in (a, b))
    if not known or factor is None or not node.meta["val"].dtype.is_floating_point:
        return pointwise(trace, node)
    sign = 1 if node.target is aten.add.Tensor else -1
    return operations.add(node, [trace[a], _times(trace[b], sign * factor)], shape_of(node))


def _times(form: Form, factor: float) -> Form:
    return form if factor == 1 else operations.scaled(form, factor)


@HANDLERS.of(aten.neg.default)
def _negative(trace: Forms, node: fx.Node) -> Form:
    form = trace[arguments(node)[0]]
    known = form.term.parts is not None and node.meta["val"].dtype.is_floating_point
    return operations.scaled(form, -1.0) if known else pointwise(trace, node)


@HANDLERS.of(aten.constant_pad_nd.default)
def _pad(trace: Forms, node: fx.Node) -> Form:
    form, amounts = trace[arguments(node)[0]], [size_of(amount) for amount in arguments(node)[1]]
    before_after = list(zip(amounts[::2], amounts[1::2], strict=True))[::-1]
    padded = [len(form.dims) - len(before_after) + i for i, pair in enumerate(before_after) if pair != (0, 0)]
    if len(padded) != 1 or argument(node, "value") != 0:
        return operations.leaf(node, shape_of(node))
    before, after = before_after[padded[0] - len(form.dims) + len(before_after)]
    if any(not isinstance(size, int) or size < 0 for size in (before, after)):
        return operations.leaf(node, shape_of(node))
    return operations.pad(node, form, padded[0], before, after)


@HANDLERS.of(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scale(trace: Forms, node: fx.Node) -> Form:
    division = node.target in (aten.div.Tensor, aten.div.Scalar)
    a, b = arguments(node)[:2]
    if not division and isinstance(a, int | float) and is_tensor(b):
        a, b = b, a
    number = isinstance(b, int | float) and not isinstance(b, bool) and not (division and b == 0)
    scalable = is_tensor(a) and (trace[a].term.parts is not None or in_fp8(trace, trace[a]))
    if scalable and number and node.meta["val"].dtype.is_floating_point:
        return operations.scaled(trace[a], 1 / b if division else float(b))
    known = None
    if not division and is_tensor(a) and is_tensor(b):
        known = dequantized(trace, node) or dequantized_read(trace, node)
    return known or pointwise(trace, node)
