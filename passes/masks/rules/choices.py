"""Rules of ops that choose between the elements of two tensors, or among those of one."""

from __future__ import annotations

import operator

from torch import fx

from ...algebra.sizes import known_at_most, same
from ...algebra.terms import Axis
from ...nodes.arguments import INTEGERS, argument, arguments, aten, is_tensor
from ...nodes.constants import constant_of
from ...nodes.shapes import shape_of, size_of
from ..positions import (
    ALWAYS,
    NEVER,
    Affine,
    AtMost,
    Conditional,
    Index,
    Named,
    Truth,
    Value,
    at,
    conjunction,
    disjunction,
    negation,
)
from .rule import Rules, Values, number_of

RULES = Rules()


@RULES.of(aten.where.self)
def _where(values: Values, node: fx.Node, index: Index) -> Value | None:
    condition, a, b = (values.operand(node, index, what) for what in arguments(node))
    return select(condition, a, b)


@RULES.of(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(values: Values, node: fx.Node, index: Index) -> Value | None:
    source, mask, fill = arguments(node)
    condition = values.operand(node, index, mask)
    number = constant_of(fill)
    filled = number_of(number, node.meta["val"].dtype) if number is not None else None
    return select(condition, filled, values.operand(node, index, source))


def select(condition: Value | None, a: Value | None, b: Value | None) -> Value | None:
    """`a` where the condition holds, else `b`.

    One of two numbers may be a choice itself, if the other is one of its two values. One of two bools has to be always
    or never true.
    """
    if not isinstance(condition, Truth):
        return None
    if isinstance(a, Truth) and isinstance(b, Truth):
        if a == NEVER:
            return conjunction([negation(condition), b])
        if b == NEVER:
            return conjunction([condition, a])
        if a == ALWAYS:
            return disjunction(condition, b)
        return disjunction(negation(condition), a) if b == ALWAYS else None
    if not isinstance(a, Conditional) or not isinstance(b, Conditional):
        return None
    if a.then != a.otherwise:
        condition, a, b = negation(condition), b, a
    if a.then != a.otherwise:
        return None
    if b.then == b.otherwise:
        return Conditional(condition, a.then, b.then)
    if b.otherwise == a.then:  # `b` gives the number of `a` too: its other one is left where neither applies
        kept = conjunction([negation(condition), b.condition])
        return Conditional(kept, b.then, b.otherwise) if kept is not None else None
    if b.then == a.then:
        kept = conjunction([negation(condition), negation(b.condition)])
        return Conditional(kept, b.otherwise, b.then) if kept is not None else None
    return None


@RULES.of(aten.tril.default, aten.triu.default)
def _triangle(values: Values, node: fx.Node, index: Index) -> Value | None:
    source = arguments(node)[0]
    diagonal = argument(node, "diagonal")
    above = index[-1] - index[-2] - Affine(size_of(diagonal))  # columns right of the diagonal
    kept = Truth((AtMost(above if node.target is aten.tril.default else above * -1),))
    value = values(source, index)
    dtype = node.meta["val"].dtype
    return select(kept, value, number_of(0, dtype))


@RULES.of(aten.index.Tensor)
def _index(values: Values, node: fx.Node, index: Index) -> Value | None:
    source, indices = arguments(node)
    if len(indices) != len(shape_of(source)) or any(not is_tensor(i) for i in indices):
        return None
    entries = [values.operand(node, index, i) for i in indices]
    if not all(isinstance(entry, Affine) and _never_negative(entry) for entry in entries):
        return None  # a negative index counts from the end
    return values(source, tuple(entry for entry in entries if isinstance(entry, Affine)))


def _never_negative(entry: Affine) -> bool:
    known = all(isinstance(what, Axis) and factor > 0 for what, factor in entry.terms)
    return known and known_at_most(0, entry.const)


@RULES.of(aten.scatter.value, aten.scatter.src)
def _scatter(values: Values, node: fx.Node, index: Index) -> Value | None:
    base, dim, indices, filled = arguments(node)
    dim %= len(index)
    base_value = values(base, index)
    if node.target is aten.scatter.src:
        value = values.operand(node, index, filled) if is_tensor(filled) else None
        same_everywhere = value.then == value.otherwise if isinstance(value, Conditional) else value in (ALWAYS, NEVER)
        if not same_everywhere:
            return None  # which element is written to a key is known only at run time
    else:
        value = number_of(filled, node.meta["val"].dtype)
    key = index[dim]
    if len(key.terms) != 1 or key.terms[0][1] != 1 or not isinstance(key.terms[0][0], Axis) or key.const != 0:
        return None
    axis = key.terms[0][0]
    shape, own = shape_of(node), shape_of(indices)
    others = [i for i in range(len(shape)) if i != dim]
    if not known_at_most(axis.size, shape[dim]) or any(not same(shape[i], own[i]) for i in others):
        return None  # rows that no index covers
    named = Axis(own[dim])
    read = at(indices, own, [Affine(0, ((named, 1),)) if i == dim else entry for i, entry in enumerate(index)])
    if read is None or any(axis in index[i].axes for i in others):
        return None
    return select(Truth((Named(read, named, axis, shape[dim], _distinct(indices, dim)),)), value, base_value)


def _distinct(indices: fx.Node, dim: int) -> bool:
    """Whether provably no index occurs twice along a dimension, as in what `topk` and `sort` give."""
    while indices.target in (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default):
        if indices.meta["val"].dtype not in INTEGERS:
            return False
        indices = arguments(indices)[0]
    if indices.target is not operator.getitem or arguments(indices)[1] != 1:
        return False
    source, rank = arguments(indices)[0], len(indices.meta["val"].shape)
    if source.target is aten.topk.default or source.target is aten.sort.default:
        along = argument(source, "dim")
    else:
        return False
    return bool(along % rank == dim)
