"""Handlers of arithmetic: products, sums, scales and casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..algebra import elementwise, joins, operations
from ..algebra.made import constant
from ..algebra.sizes import Unaligned, known_at_most
from ..algebra.terms import Form, Join, Product, Read, Sum, Term, Unread, Zero
from ..nodes.arguments import argument, arguments, aten, factor_of, is_tensor
from ..nodes.shapes import shape_of, size_of
from . import halves
from .coded import WIDE, dequantized_read, is_coded, widened, widens
from .handler import Forms, Handlers, pointwise
from .weights import with_mixed_weights, with_scaled_weight

HANDLERS = Handlers()
HANDLERS.of(  # elementwise ops that torch does not tag as pointwise
    aten.complex.default,
    aten.fill.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.masked_fill.Tensor,
    aten.polar.default,
)(pointwise)


# The second is what torch puts after an op of which a number, a symbol until then, became a tensor.
@HANDLERS.of(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def _cast(trace: Forms, node: fx.Node) -> Form:
    source = arguments(node)[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if node.meta["val"].device != source.meta["val"].device:
        raise Unaligned("a copy to another device")
    if before == after:
        return trace[source]
    if (kept := halves.kept_by_cast(trace, node)) is not None:
        return kept
    floating = before.is_floating_point and after.is_floating_point
    if not floating and not widens(trace[source], source, after):
        return pointwise(trace, node)
    # To fewer bits than a model computes in, users round on purpose, as quantised keys would be.
    if after not in WIDE and _is_computed(trace[source].term):
        return pointwise(trace, node)
    return operations.cast(trace[source], after)


def _is_computed(term: Term) -> bool:
    """Whether an element, or a piece of what it is joined from, is a product or a sum."""
    if isinstance(term.parts, Join):
        return any(_is_computed(segment.term) for segment in term.parts.segments)
    return isinstance(term.parts, Product | Sum)


@HANDLERS.of(aten.mm.default, aten.mv.default)
def _mm(trace: Forms, node: fx.Node) -> Form:
    return operations.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [], (1, 0))


@HANDLERS.of(aten.bmm.default)
def _bmm(trace: Forms, node: fx.Node) -> Form:
    return operations.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [(0, 0)], (2, 1))


@HANDLERS.of(aten.dot.default)
def _dot(trace: Forms, node: fx.Node) -> Form:
    return operations.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [], (0, 0))


@HANDLERS.of(aten.addmm.default, aten.addmv.default)
def _addmm(trace: Forms, node: fx.Node) -> Form:
    _, left, right = (trace[operand] for operand in arguments(node))
    return _affine(trace, node, left, right, [], (1, 0))


@HANDLERS.of(aten.baddbmm.default)
def _baddbmm(trace: Forms, node: fx.Node) -> Form:
    _, left, right = (trace[operand] for operand in arguments(node))
    return _affine(trace, node, left, right, [(0, 0)], (2, 1))


@HANDLERS.of(aten.addbmm.default)
def _addbmm(trace: Forms, node: fx.Node) -> Form:
    """Products that are summed over the batch are a single product, summed over batch and width."""
    _, left, right = (trace[operand] for operand in arguments(node))
    (batch, rows, width), columns = left.shape, right.shape[2]
    left = operations.view(operations.permute(left, (1, 0, 2)), (rows, batch * width))
    return _affine(trace, node, left, operations.view(right, (batch * width, columns)), [], (1, 0))


@HANDLERS.of(aten.addr.default)
def _addr(trace: Forms, node: fx.Node) -> Form:
    _, left, right = (trace[operand] for operand in arguments(node))
    rows, columns = Form((*left.dims, ()), left.term), Form(((), *right.dims), right.term)
    return _affine(trace, node, rows, columns, [], (1, 0))


@HANDLERS.of(aten.convolution.default)
def _convolution(trace: Forms, node: fx.Node) -> Form:
    """A convolution over a single place is a product over channels, the second dimension of its input and output."""
    x, weight, bias, stride, padding, _, transposed, _, groups = arguments(node)
    if transposed or groups != 1 or any(n != 1 for n in (*shape_of(weight)[2:], *stride)) or any(padding):
        raise Unaligned("a convolution wider than one position, or over groups of channels")
    matrix = trace[weight]
    for _ in shape_of(weight)[2:]:
        matrix = operations.select(matrix, 2, 0)
    whole = operations.contract(Unread(node), trace[x], matrix, [], (1, 1))
    last = len(whole.dims) - 1
    product = operations.permute(whole, [0, last, *range(1, last)])
    if bias is None:
        read = operations.read_of(node, product.dims, product.term.axes)
        return Form(product.dims, replace(read, parts=product.term.parts))
    own = Form((*trace[bias].dims, *(() for _ in range(1, last))), trace[bias].term)
    return elementwise.add(node, [product, own], shape_of(node))


def _affine(
    trace: Forms, node: fx.Node, left: Form, right: Form, batch: list[tuple[int, int]], summed: tuple[int, int]
) -> Form:
    """`beta * addend + alpha * left @ right`, the addend being the node's first argument."""
    alpha, beta = factor_of(node), factor_of(node, "beta")
    if alpha is None or beta is None:
        raise Unaligned("a product times a number that is not known")
    if beta == 0:  # torch ignores the addend then, even if it is NaN
        return operations.contract(node, left, right, batch, summed, scale=alpha)
    product = _times(operations.contract(Unread(node), left, right, batch, summed), alpha)
    return elementwise.add(node, [product, _times(trace[arguments(node)[0]], beta)], shape_of(node))


_SUBTRACT = {aten.sub.Tensor, aten.sub.Scalar}
_SUBTRACT_FROM = {aten.rsub.Tensor, aten.rsub.Scalar}


@HANDLERS.of(aten.add.Tensor, aten.add.Scalar, *_SUBTRACT, *_SUBTRACT_FROM)
def _add(trace: Forms, node: fx.Node) -> Form:
    if (numbers := halves.with_signs(trace, node)) is not None:
        return numbers
    a, b = arguments(node)[:2]
    if (whole := _beside_nothing(node)) is not None and trace[whole].term.parts is None:
        return trace[whole]
    factor = factor_of(node)
    forms = [_added(trace, operand, other, node) for operand, other in ((a, b), (b, a))]
    known = [form for form in forms if form is not None]
    if factor is None or len(known) < 2 or all(form.term.parts is None for form in known):
        return pointwise(trace, node)
    first, second = known[::-1] if node.target in _SUBTRACT_FROM else known
    sign = -1 if node.target in _SUBTRACT | _SUBTRACT_FROM else 1
    return elementwise.add(node, [first, _times(second, sign * factor)], shape_of(node))


def _beside_nothing(node: fx.Node) -> fx.Node | None:
    """The tensor to which a sum adds the number 0, as Python's `sum` does to the first; None if it adds another."""
    whole, number = arguments(node)[:2]
    if node.target in _SUBTRACT_FROM or not is_tensor(whole) or not isinstance(number, int | float) or number != 0:
        return None
    return whole if whole.meta["val"].dtype == node.meta["val"].dtype else None


def _added(trace: Forms, operand: Any, other: Any, node: fx.Node) -> Form | None:
    """What an operand adds to the sum `node`: its own form or, of a number beside a tensor that is known, that of a
    tensor of this number; None if there is none in a floating dtype."""
    dtype = node.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    if is_tensor(operand):
        return trace[operand]
    if isinstance(operand, bool) or not isinstance(operand, int | float) or not math.isfinite(operand):
        return None
    like = _held_in(trace[other].term, dtype) if is_tensor(other) else None
    number = None if like is None else constant(like, float(operand), ())
    return None if number is None else Form((), Term(number, None if operand else Zero()))


def _held_in(term: Term, dtype: torch.dtype) -> Read | None:
    """A tensor that a term is computed from, of which a number in `dtype` can have the dtype; None if there is none.

    The term's own tensor is none: it would be kept for its dtype alone.
    """
    match term.parts:
        case Product(left, right):
            inner: Sequence[Term] = (right, left)
        case Sum(inner):
            pass
        case Join(_, segments):
            inner = [segment.term for segment in segments]
        case _:
            return None
    for part in inner:
        source = part.read.source
        if part.parts is None and isinstance(source, fx.Node) and (own := source.meta["val"].dtype) in WIDE:
            if torch.promote_types(own, dtype) == own:
                return Read(source, ())
        elif (found := _held_in(part, dtype)) is not None:
            return found
    return None


def _times(form: Form, factor: float) -> Form:
    return form if factor == 1 else operations.scaled(form, factor)


@HANDLERS.of(aten.lerp.Scalar, aten.lerp.Tensor)
def _mixed(trace: Forms, node: fx.Node) -> Form:
    return with_mixed_weights(trace, node) or pointwise(trace, node)


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
    if not padded:
        return form
    if len(padded) != 1 or argument(node, "value") != 0:
        raise Unaligned("padding of several dimensions, or with another number than 0")
    before, after = before_after[padded[0] - len(form.dims) + len(before_after)]
    if not known_at_most(0, before) or not known_at_most(0, after):
        raise Unaligned("padding by a size that is negative or not known")
    return joins.pad(node, form, padded[0], before, after)


@HANDLERS.of(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scale(trace: Forms, node: fx.Node) -> Form:
    division = node.target in (aten.div.Tensor, aten.div.Scalar)
    a, b = arguments(node)[:2]
    if not division and isinstance(a, int | float) and is_tensor(b):
        a, b = b, a
    number = isinstance(b, int | float) and not isinstance(b, bool) and not (division and b == 0)
    if is_tensor(a) and number and math.isfinite(b) and node.meta["val"].dtype.is_floating_point:
        form = widened(trace[a], a, node.meta["val"].dtype)
        if form.term.parts is not None or is_coded(form.term):
            return operations.scaled(form, 1 / b if division else float(b))
    known = None
    if not division and is_tensor(a) and is_tensor(b):
        known = with_scaled_weight(trace, node) or dequantized_read(trace, node)
    return known or pointwise(trace, node)
