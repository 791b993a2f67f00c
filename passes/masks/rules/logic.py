"""Rules of comparisons, and of ops that combine and negate them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from ...algebra.sizes import total
from ...nodes.arguments import NEGATIONS, arguments, aten
from ..positions import (
    ALWAYS,
    NEVER,
    Affine,
    AtMost,
    Conditional,
    Index,
    Truth,
    Value,
    conjunction,
    constant,
    disjunction,
    negation,
)
from .rule import Rule, Rules, Values, rounded

RULES = Rules()


def _compares(difference: Callable[[Affine, Affine], Affine], test: Callable[[float, float], bool]) -> Rule:
    def rule(values: Values, node: fx.Node, index: Index) -> Value | None:
        a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            return Truth((AtMost(difference(a, b)),))
        return _compared(node, a, b, test)

    return rule


def _compared(node: fx.Node, a: Value | None, b: Value | None, test: Callable[[float, float], bool]) -> Value | None:
    """Where a test of a number that a condition chooses and one that is the same everywhere holds."""
    if isinstance(b, Affine) and b.is_number:
        b = constant(float(total([b.const])))
    if not isinstance(a, Conditional) or not isinstance(b, Conditional) or b.then != b.otherwise:
        return None
    operands = (what.meta["val"] if isinstance(what, fx.Node) else what for what in arguments(node)[:2])
    number, dtype = b.then, torch.result_type(*operands)
    return a.where(lambda x: test(rounded(x, dtype), rounded(number, dtype)))


_ONE = Affine(1)
RULES.of(aten.le.Tensor, aten.le.Scalar)(_compares(lambda a, b: a - b, operator.le))
RULES.of(aten.lt.Tensor, aten.lt.Scalar)(_compares(lambda a, b: a - b + _ONE, operator.lt))
RULES.of(aten.ge.Tensor, aten.ge.Scalar)(_compares(lambda a, b: b - a, operator.ge))
RULES.of(aten.gt.Tensor, aten.gt.Scalar)(_compares(lambda a, b: b - a + _ONE, operator.gt))


@RULES.of(aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar)
def _equal(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    if isinstance(a, Truth):
        a = Conditional(a, 1.0, 0.0)
    if isinstance(b, Truth) and b in (ALWAYS, NEVER):
        b = Affine(int(b == ALWAYS))
    same = node.target in (aten.eq.Tensor, aten.eq.Scalar)
    return _compared(node, a, b, operator.eq if same else operator.ne)


@RULES.of(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return conjunction([a, b]) if isinstance(a, Truth) and isinstance(b, Truth) else None


@RULES.of(aten.bitwise_or.Tensor, aten.logical_or.default)
def _or(values: Values, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return disjunction(a, b) if isinstance(a, Truth) and isinstance(b, Truth) else None


@RULES.of(*NEGATIONS)
def _not(values: Values, node: fx.Node, index: Index) -> Value | None:
    value = values(arguments(node)[0], index)
    return negation(value) if isinstance(value, Truth) else None
