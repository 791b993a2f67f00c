"""Rules of sums, products and casts."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from ...nodes.arguments import INTEGERS, arguments, aten
from ..positions import Affine, Conditional, Index, Truth, Value, conjunction, constant, negation
from .rule import Rules, Values, rounded

RULES = Rules()


@RULES.of(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)
def _add(values: Values, node: fx.Node, index: Index) -> Value | None:
    if node.kwargs or len(arguments(node)) > 2:
        return None
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    if node.target is aten.rsub.Scalar:
        a, b = b, a
    sign = 1 if node.target in (aten.add.Tensor, aten.add.Scalar) else -1
    if isinstance(a, Affine) and isinstance(b, Affine):
        return a + b * sign if node.meta["val"].dtype in INTEGERS else None
    return _combined(node, lambda x, y: x + sign * y, a, b)


@RULES.of(aten.mul.Tensor, aten.mul.Scalar)
def _mul(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    if isinstance(a, Truth) and isinstance(b, Truth):
        return conjunction([a, b])
    if isinstance(a, Affine) and isinstance(b, Affine) and node.meta["val"].dtype in INTEGERS:
        for x, y in ((a, b), (b, a)):
            if not x.terms and isinstance(x.const, int):
                return y * x.const
        return None
    return _combined(node, operator.mul, a, b)


@RULES.of(aten.neg.default)
def _neg(values: Values, node: fx.Node, index: Index) -> Value | None:
    value = values(arguments(node)[0], index)
    if isinstance(value, Affine):
        return value * -1
    return value.map(operator.neg) if isinstance(value, Conditional) else None


def _combined(
    node: fx.Node, function: Callable[[float, float], float], a: Value | None, b: Value | None
) -> Conditional | None:
    """A function of two numbers that one condition chooses, or one of which is the same everywhere."""
    if not node.meta["val"].dtype.is_floating_point:
        return None
    dtype = node.meta["val"].dtype
    a, b = (constant(float(x.const)) if isinstance(x, Affine) and x.is_number else x for x in (a, b))
    if not isinstance(a, Conditional) or not isinstance(b, Conditional):
        return None
    a, b = a.settled(), b.settled()
    condition = a.condition
    if a.then == a.otherwise:
        condition = b.condition
    elif b.then != b.otherwise and a.condition != b.condition:
        return _both_added(function, a, b)
    return Conditional(
        condition,
        rounded(function(a.then, b.then), dtype),
        rounded(function(a.otherwise, b.otherwise), dtype),
    )


def _both_added(function: Callable[[float, float], float], a: Conditional, b: Conditional) -> Conditional | None:
    """The sum of two numbers each of which is 0 or -inf: it is 0 where both are."""
    hidden = (0.0, float("-inf"))
    a, b = (x if x.then >= x.otherwise else Conditional(negation(x.condition), x.otherwise, x.then) for x in (a, b))
    if (a.then, a.otherwise) != hidden or (b.then, b.otherwise) != hidden or function(0.0, -1.0) != -1.0:
        return None
    both = conjunction([a.condition, b.condition])
    return Conditional(both, *hidden) if both is not None else None


@RULES.of(aten._to_copy.default)
def _cast(values: Values, node: fx.Node, index: Index) -> Value | None:
    source = arguments(node)[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    value = values(source, index)
    if isinstance(value, Truth) and after.is_floating_point:
        return Conditional(value, 1.0, 0.0)
    if isinstance(value, Conditional) and after == torch.bool:
        return value.where(lambda x: x != 0)
    if isinstance(value, Conditional) and after.is_floating_point:
        return value.map(lambda x: rounded(x, after))
    if isinstance(value, Affine) and before == torch.int32 and after == torch.int64:
        return value
    return None
