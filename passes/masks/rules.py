"""Rules of `valuation`: what one operation makes of the positions, truths and numbers of its operands.

A rule gives the value of a node's element at an index, or None where the operation says nothing of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from ..algebra.sizes import same, total
from ..algebra.terms import Axis
from ..attention.scores import constant_of
from ..nodes.arguments import argument, arguments, aten, is_tensor
from ..nodes.shapes import shape_of, size_of
from .positions import (
    ALWAYS,
    NEVER,
    Affine,
    AtMost,
    Choice,
    Index,
    Named,
    Truth,
    Value,
    at,
    conjunction,
    constant,
    disjunction,
    negation,
)

if TYPE_CHECKING:
    from .valuation import Valuation

INTEGERS = (torch.int64, torch.int32)


def rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def number_of(number: Any, dtype: torch.dtype) -> Value | None:
    if isinstance(number, fx.Node):
        return Affine(size_of(number)) if dtype in INTEGERS else None
    if dtype == torch.bool:
        return ALWAYS if number else NEVER
    if dtype in INTEGERS:
        return Affine(int(number))
    return constant(rounded(float(number), dtype)) if dtype.is_floating_point else None


Rule: TypeAlias = Callable[["Valuation", fx.Node, Index], Value | None]
RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


# Constants and positions


@_rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    number = arguments(node)[2] if node.target is aten.new_full.default else arguments(node)[1]
    return number_of(number, node.meta["val"].dtype)


@_rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    return number_of(1, node.meta["val"].dtype)


@_rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    return number_of(0, node.meta["val"].dtype)


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    start, step = 0, 1
    if node.target is not aten.arange.default:
        start = arguments(node)[0]
        step = arguments(node)[2] if len(arguments(node)) > 2 else 1
    if node.meta["val"].dtype not in INTEGERS or not isinstance(step, int) or isinstance(start, float):
        return None
    return Affine(size_of(start)) + index[0] * step


@_rule(aten.cumsum.default)
def _cumsum(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    source, dim = arguments(node)[:2]
    if values(source, index) != Affine(1):
        return None
    return index[dim % len(index)] + Affine(1)


# Arithmetic


@_rule(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)
def _add(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    if node.kwargs or len(arguments(node)) > 2:
        return None
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    if node.target is aten.rsub.Scalar:
        a, b = b, a
    sign = 1 if node.target in (aten.add.Tensor, aten.add.Scalar) else -1
    if isinstance(a, Affine) and isinstance(b, Affine):
        return a + b * sign if node.meta["val"].dtype in INTEGERS else None
    return _combined(node, lambda x, y: x + sign * y, a, b)


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    if isinstance(a, Truth) and isinstance(b, Truth):
        return conjunction([a, b])
    if isinstance(a, Affine) and isinstance(b, Affine) and node.meta["val"].dtype in INTEGERS:
        for x, y in ((a, b), (b, a)):
            if not x.terms and isinstance(x.const, int):
                return y * x.const
        return None
    return _combined(node, operator.mul, a, b)


@_rule(aten.neg.default)
def _neg(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    value = values(arguments(node)[0], index)
    if isinstance(value, Affine):
        return value * -1
    return value.map(operator.neg) if isinstance(value, Choice) else None


def _combined(
    node: fx.Node, function: Callable[[float, float], float], a: Value | None, b: Value | None
) -> Choice | None:
    """A function of two numbers that the same condition chooses, or of which one is the same everywhere."""
    if not node.meta["val"].dtype.is_floating_point:
        return None
    dtype = node.meta["val"].dtype
    a, b = (constant(float(x.const)) if isinstance(x, Affine) and _isnumber_of(x) else x for x in (a, b))
    if not isinstance(a, Choice) or not isinstance(b, Choice):
        return None
    condition = a.condition
    if a.then == a.otherwise:
        condition = b.condition
    elif b.then != b.otherwise and a.condition != b.condition:
        return _both_added(function, a, b)
    return Choice(
        condition,
        rounded(function(a.then, b.then), dtype),
        rounded(function(a.otherwise, b.otherwise), dtype),
    )


def _isnumber_of(value: Affine) -> bool:
    return not value.terms and isinstance(value.const, int)


def _both_added(function: Callable[[float, float], float], a: Choice, b: Choice) -> Choice | None:
    """Two numbers that are 0 or -inf each, added: 0 where both are."""
    hidden = (0.0, float("-inf"))
    a, b = (x if x.then >= x.otherwise else Choice(negation(x.condition), x.otherwise, x.then) for x in (a, b))
    if (a.then, a.otherwise) != hidden or (b.then, b.otherwise) != hidden or function(0.0, -1.0) != -1.0:
        return None
    both = conjunction([a.condition, b.condition])
    return Choice(both, *hidden) if both is not None else None


@_rule(aten._to_copy.default)
def _cast(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    source = arguments(node)[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    value = values(source, index)
    if isinstance(value, Truth) and after.is_floating_point:
        return Choice(value, 1.0, 0.0)
    if isinstance(value, Choice) and after == torch.bool:
        return _chosen(value, lambda x: x != 0)
    if isinstance(value, Choice) and after.is_floating_point:
        return value.map(lambda x: rounded(x, after))
    if isinstance(value, Affine) and before == torch.int32 and after == torch.int64:
        return value
    return None


def _chosen(value: Choice, test: Callable[[float], bool]) -> Truth:
    """Where a test of the chosen number holds."""
    then, otherwise = test(value.then), test(value.otherwise)
    if then == otherwise:
        return ALWAYS if then else NEVER
    return value.condition if then else negation(value.condition)


# Comparisons and logic


def _compares(difference: Callable[[Affine, Affine], Affine], test: Callable[[float, float], bool]) -> Rule:
    def rule(values: Valuation, node: fx.Node, index: Index) -> Value | None:
        a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            return Truth((AtMost(difference(a, b)),))
        if isinstance(a, Choice) and isinstance(b, Affine) and _isnumber_of(b):
            b = constant(float(total([b.const])))
        if isinstance(a, Choice) and isinstance(b, Choice) and b.then == b.otherwise:
            return _chosen(a, lambda x: test(x, b.then))
        return None

    return rule


_ONE = Affine(1)
_rule(aten.le.Tensor, aten.le.Scalar)(_compares(lambda a, b: a - b, operator.le))
_rule(aten.lt.Tensor, aten.lt.Scalar)(_compares(lambda a, b: a - b + _ONE, operator.lt))
_rule(aten.ge.Tensor, aten.ge.Scalar)(_compares(lambda a, b: b - a, operator.ge))
_rule(aten.gt.Tensor, aten.gt.Scalar)(_compares(lambda a, b: b - a + _ONE, operator.gt))


@_rule(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return conjunction([a, b]) if isinstance(a, Truth) and isinstance(b, Truth) else None


@_rule(aten.bitwise_or.Tensor, aten.logical_or.default)
def _or(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    a, b = (values.operand(node, index, what) for what in arguments(node)[:2])
    return disjunction(a, b) if isinstance(a, Truth) and isinstance(b, Truth) else None


@_rule(aten.bitwise_not.default, aten.logical_not.default)
def _not(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    value = values(arguments(node)[0], index)
    return negation(value) if isinstance(value, Truth) else None


# What chooses


@_rule(aten.where.self)
def _where(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    condition, a, b = (values.operand(node, index, what) for what in arguments(node))
    return _select(condition, a, b)


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    source, mask, fill = arguments(node)
    condition = values.operand(node, index, mask)
    number = constant_of(fill)
    filled = number_of(number, node.meta["val"].dtype) if number is not None else None
    return _select(condition, filled, values.operand(node, index, source))


def _select(condition: Value | None, a: Value | None, b: Value | None) -> Value | None:
    """`a` where the condition holds, else `b`, of which at most one is a choice itself that agrees with the other."""
    if not isinstance(condition, Truth):
        return None
    if isinstance(a, Truth) and isinstance(b, Truth):
        if a == NEVER:
            return conjunction([negation(condition), b])
        return conjunction([condition, a]) if b == NEVER else None
    if not isinstance(a, Choice) or not isinstance(b, Choice):
        return None
    if a.then != a.otherwise:
        condition, a, b = negation(condition), b, a
    if a.then != a.otherwise:
        return None
    if b.then == b.otherwise:
        return Choice(condition, a.then, b.then)
    if b.otherwise == a.then:  # the same number from both: what is left is where neither applies
        kept = conjunction([negation(condition), b.condition])
        return Choice(kept, b.then, b.otherwise) if kept is not None else None
    if b.then == a.then:
        kept = conjunction([negation(condition), negation(b.condition)])
        return Choice(kept, b.otherwise, b.then) if kept is not None else None
    return None


@_rule(aten.tril.default, aten.triu.default)
def _triangle(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    source = arguments(node)[0]
    diagonal = argument(node, "diagonal")
    above = index[-1] - index[-2] - Affine(size_of(diagonal))  # columns right of the diagonal
    kept = Truth((AtMost(above if node.target is aten.tril.default else above * -1),))
    value = values(source, index)
    dtype = node.meta["val"].dtype
    return _select(kept, value, number_of(0, dtype))


@_rule(aten.index.Tensor)
def _index(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    source, indices = arguments(node)
    if len(indices) != len(shape_of(source)) or any(not is_tensor(i) for i in indices):
        return None
    entries = [values.operand(node, index, i) for i in indices]
    if not all(isinstance(entry, Affine) and _never_negative(entry) for entry in entries):
        return None  # a negative index counts from the end
    return values(source, tuple(entry for entry in entries if isinstance(entry, Affine)))


def _never_negative(entry: Affine) -> bool:
    known = all(isinstance(what, Axis) and factor > 0 for what, factor in entry.terms)
    return known and (entry.const >= 0 if isinstance(entry.const, int) else bool(entry.const.is_nonnegative))


@_rule(aten.scatter.value, aten.scatter.src)
def _scatter(values: Valuation, node: fx.Node, index: Index) -> Value | None:
    base, dim, indices, filled = arguments(node)
    dim %= len(index)
    base_value = values(base, index)
    if node.target is aten.scatter.src:
        value = values.operand(node, index, filled) if is_tensor(filled) else None
        if not isinstance(value, Truth | Choice) or (isinstance(value, Choice) and value.then != value.otherwise):
            return None
    else:
        value = number_of(filled, node.meta["val"].dtype)
    key = index[dim]
    if len(key.terms) != 1 or key.terms[0][1] != 1 or not isinstance(key.terms[0][0], Axis) or key.const != 0:
        return None
    axis = key.terms[0][0]
    shape, own = shape_of(node), shape_of(indices)
    others = [i for i in range(len(shape)) if i != dim]
    if not same(shape[dim], axis.size) or any(not same(shape[i], own[i]) for i in others):
        return None  # rows that no index speaks of
    named = Axis(own[dim])
    read = at(indices, own, [Affine(0, ((named, 1),)) if i == dim else entry for i, entry in enumerate(index)])
    if read is None or any(axis in index[i].axes for i in others):
        return None
    return _select(Truth((Named(read, named, axis, _distinct(indices, dim)),)), value, base_value)


def _distinct(indices: fx.Node, dim: int) -> bool:
    """Whether no index is there twice along a dimension: what `topk` and `sort` give."""
    while indices.target in (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default):
        if indices.meta["val"].dtype not in INTEGERS:
            return False
        indices = arguments(indices)[0]
    if indices.target is not operator.getitem or arguments(indices)[1] != 1:
        return False
    source, rank = arguments(indices)[0], len(indices.meta["val"].shape)
    if source.target not in (aten.topk.default, aten.sort.default):
        return False
    return bool(argument(source, "dim") % rank == dim)
