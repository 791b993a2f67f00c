"""Rules of comparisons, and of ops that combine and negate them."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from ...algebra.sizes import total
from ...nodes.arguments import arguments, aten
from ..positions import Affine, AtMost, Conditional, Index, Truth, Value, conjunction, constant, disjunction, negation
from .rule import Rule, Rules, Values

RULES = Rules()


def _compares(difference: Callable[[Affine, Affine], Affine], test: Callable[[float, float], bool]) -> Rule:
    def rule(values: Values, node: fx.Node, index: Index) -> Value | None:
        a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            return Truth((AtMost(difference(a, b)),))
        if isinstance(a, Conditional) and isinstance(b, Affine) and b.is_number:
            b = constant(float(total([b.const])))
        if isinstance(a, Conditional) and isinstance(b, Conditional) and b.then == b.otherwise:
            return a.where(lambda x: test(x, b.then))
        return None

    return rule


_ONE = Affine(1)
RULES.of(aten.le.Tensor, aten.le.Scalar)(_compares(lambda a, b: a - b, operator.le))
RULES.of(aten.lt.Tensor, aten.lt.Scalar)(_compares(lambda a, b: a - b + _ONE, operator.lt))
RULES.of(aten.ge.Tensor, aten.ge.Scalar)(_compares(lambda a, b: b - a, operator.ge))
RULES.of(aten.gt.Tensor, aten.gt.Scalar)(_compares(lambda a, b: b - a + _ONE, operator.gt))


@RULES.of(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return conjunction([a, b]) if isinstance(a, Truth) and isinstance(b, Truth) else None


@RULES.of(aten.bitwise_or.Tensor, aten.logical_or.default)
def _or(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return disjunction(a, b) if isinstance(a, Truth) and isinstance(b, Truth) else None


@RULES.of(aten.bitwise_not.default, aten.logical_not.default)
def _not(values: Values, node: fx.Node, index: Index) -> Value | None:
    value = values(arguments(node)[0], index)
    return negation(value) if isinstance(value, Truth) else None
