"""Rules of ops that fill a tensor with one number, or with positions."""

from __future__ import annotations

from torch import fx

from ...algebra.terms import Axis
from ...nodes.arguments import INTEGERS, arguments, aten
from ...nodes.shapes import shape_of, size_of
from ..positions import Affine, Index, Value
from .rule import Rules, Values, number_of

RULES = Rules()


@RULES.of(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def _full(values: Values, node: fx.Node, index: Index) -> Value | None:
    number = arguments(node)[2] if node.target is aten.new_full.default else arguments(node)[1]
    return number_of(number, node.meta["val"].dtype)


@RULES.of(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(values: Values, node: fx.Node, index: Index) -> Value | None:
    return number_of(1, node.meta["val"].dtype)


@RULES.of(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(values: Values, node: fx.Node, index: Index) -> Value | None:
    return number_of(0, node.meta["val"].dtype)


@RULES.of(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(values: Values, node: fx.Node, index: Index) -> Value | None:
    start, step = 0, 1
    if node.target is not aten.arange.default:
        start = arguments(node)[0]
        step = arguments(node)[2] if len(arguments(node)) > 2 else 1
    if node.meta["val"].dtype not in INTEGERS or not isinstance(step, int) or isinstance(start, float):
        return None
    return Affine(size_of(start)) + index[0] * step


@RULES.of(aten.cumsum.default)
def _cumsum(values: Values, node: fx.Node, index: Index) -> Value | None:
    source, dim = arguments(node)[:2]
    dim %= len(index)
    any_index = Affine(0, ((Axis(shape_of(node)[dim]), 1),))
    ones = values(source, (*index[:dim], any_index, *index[dim + 1 :])) == Affine(1)
    return index[dim] + Affine(1) if ones and node.meta["val"].dtype in INTEGERS else None
