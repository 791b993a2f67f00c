"""Rules of ops that put tensors side by side.

cat(zeros, triu(-inf, 1)),  pad(triu(-inf, 1), (n, 0))      keys before the present ones, which all queries see
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...algebra.sizes import Size, known_at_most, same, total
from ...algebra.terms import Axis
from ...nodes.arguments import argument, arguments, aten
from ...nodes.shapes import shape_of, size_of
from ..positions import Affine, AtMost, Conditional, Index, Truth, Value
from .choices import select
from .rule import Rules, Values, number_of

RULES = Rules()


def side_by_side(place: Affine, pieces: Sequence[tuple[Size, Value | None]]) -> Value | None:
    """The value at an index `place` of pieces, each of a size and with its own value there; None if that is unknown, or
    an element of a tensor, which has none at the places of other pieces."""
    *firsts, (_, last) = [(size, value) for size, value in pieces if not same(size, 0)] or pieces
    if firsts and not all(_is_of_positions(value) for value in (last, *(value for _, value in firsts))):
        return None
    value = _settled(last)
    while firsts:
        end = total(size for size, _ in firsts)
        _, before = firsts.pop()
        value = _reduced(select(Truth((AtMost(place - Affine(end) + Affine(1)),)), _settled(before), value))
    return value


def _is_of_positions(value: Value | None) -> bool:
    """Whether a value depends on positions alone."""
    truth = value.condition if isinstance(value, Conditional) else value
    return isinstance(truth, Truth) and all(
        isinstance(literal, AtMost) and all(isinstance(what, Axis) for what, _ in literal.what.terms)
        for literal in truth.literals
    )


def _settled(value: Value | None) -> Value | None:
    """A value without a condition that provably always holds, or never."""
    match value:
        case Conditional():
            return value.settled()
        case Truth():
            return Conditional(value, 1.0, 0.0).settled().where(bool)
    return value


def _reduced(value: Value | None) -> Value | None:
    """A value without those of its inequalities that follow from others."""
    match value:
        case Conditional():
            return replace(value, condition=_without_implied(value.condition))
        case Truth():
            return _without_implied(value)
    return value


def _without_implied(truth: Truth) -> Truth:
    kept = list(truth.literals)
    for literal in truth.literals:
        others = [other.what for other in kept if isinstance(other, AtMost) and other is not literal]
        if isinstance(literal, AtMost) and any((literal.what - other).never_positive for other in others):
            kept.remove(literal)
    return replace(truth, literals=tuple(kept))


@RULES.of(aten.cat.default)
def _cat(values: Values, node: fx.Node, index: Index) -> Value | None:
    tensors, dim = arguments(node)[0], argument(node, "dim") % len(index)
    kinds = {(len(shape_of(tensor)), tensor.meta["val"].dtype) for tensor in tensors}
    if kinds != {(len(index), node.meta["val"].dtype)}:
        return None
    pieces: list[tuple[Size, Value | None]] = []
    for tensor in tensors:
        start, size = total(size for size, _ in pieces), shape_of(tensor)[dim]
        own = Affine() if same(size, 1) else index[dim] - Affine(start)
        pieces.append((size, values(tensor, (*index[:dim], own, *index[dim + 1 :]))))
    return side_by_side(index[dim], pieces)


@RULES.of(aten.constant_pad_nd.default)
def _pad(values: Values, node: fx.Node, index: Index) -> Value | None:
    source, widths = arguments(node)[:2]
    beside = list(map(size_of, widths))
    if not all(known_at_most(0, width) for width in beside):
        return None
    number = number_of(argument(node, "value"), node.meta["val"].dtype)
    own, sizes = list(index), shape_of(source)
    for k, before in enumerate(beside[::2]):  # widths begin with those of the last dimension
        own[-1 - k] = Affine() if same(sizes[-1 - k], 1) else own[-1 - k] - Affine(before)
    value = values(source, tuple(own))
    for k, (before, behind) in enumerate(zip(beside[::2], beside[1::2], strict=True)):
        value = side_by_side(index[-1 - k], [(before, number), (sizes[-1 - k], value), (behind, number)])
    return value
