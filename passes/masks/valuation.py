"""Value the elements of a graph's tensors in the algebra on positions (see `positions`), from the masks backwards."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ..algebra.sizes import Size, product, same, total
from ..algebra.terms import Axis, Constant, Form, Joined, Read
from ..nodes.arguments import INTEGERS, is_tensor
from ..nodes.constants import constant_of
from ..nodes.shapes import shape_of, size_of
from ..trace.trace import Trace
from .positions import ALWAYS, NEVER, Affine, Conditional, Element, Index, Truth, Value, at, constant
from .rules.joins import side_by_side
from .rules.rule import Rules, number_of, rounded

_DEPTH = 100
"""The longest chain of operations that a mask is followed through; what is further up is an arbitrary tensor."""


class Valuation:
    """Values of the elements of one graph's tensors, by `rules`."""

    def __init__(self, trace: Trace, rules: Rules) -> None:
        self.trace, self.rules = trace, rules
        self._known: dict[tuple[fx.Node, Index], Value | None] = {}
        self._depth = 0

    def of_read(self, read: Read) -> Value | None:
        """The value of what a term reads; None if no rule gives one."""
        return self._of_read(read, None)

    def _of_read(self, read: Read, bindings: dict[Axis, Affine] | None) -> Value | None:
        """The value of what is read where its axes are bound like this or, without bindings, stand for themselves."""
        source, index = read.source, _index_of(read, bindings)
        if index is None:
            return None
        match source:
            case fx.Node():
                value = self(source, index)
            case Constant(_, number):
                value = (ALWAYS if number else NEVER) if isinstance(number, bool) else constant(number)
            case Joined():
                value = self._joined(source, index)
            case _:
                return None
        return _after(value, read.then)

    def _joined(self, source: Joined, index: Index) -> Value | None:
        """The value of an element of reads that are joined along the first dimension."""
        place, *others = index
        pieces: list[tuple[Size, Value | None]] = []
        for piece, along in zip(source.pieces, source.along, strict=True):
            if len(along) > 1:
                return None
            start = Affine(total(size for size, _ in pieces))
            bindings = dict(zip(source.axes, others, strict=True)) | dict.fromkeys(along, place - start)
            pieces.append((product(axis.size for axis in along), self._of_read(piece, bindings)))
        return side_by_side(place, pieces)

    def __call__(self, node: fx.Node, index: Index) -> Value | None:
        """The value of a node's element at an index; None if no rule gives one."""
        if (node, index) not in self._known:
            if self._depth == _DEPTH:
                return self._opaque(node, index)
            self._depth += 1
            self._known[node, index] = self._value(node, index)
            self._depth -= 1
        return self._known[node, index]

    def _value(self, node: fx.Node, index: Index) -> Value | None:
        form = self.trace[node]
        read = form.term.read
        if read.source is not node and isinstance(read.source, fx.Node):
            value = self._of_read(read, _bindings(form, index))
        else:
            rule = self.rules.get(node.target) if node.op == "call_function" else None
            value = rule(self, node, index) if rule is not None else None
            if value is None and is_tensor(node) and not node.meta["val"].shape:
                value = _scalar(node)
        return self._opaque(node, index) if value is None else value

    def _opaque(self, node: fx.Node, index: Index) -> Value | None:
        dtype = node.meta["val"].dtype
        read = at(node, shape_of(node), index) if dtype == torch.bool or dtype in INTEGERS else None
        if read is None:
            return None
        return Truth((Element(read),)) if dtype == torch.bool else Affine(0, ((read, 1),))

    def operand(self, node: fx.Node, index: Index, what: Any) -> Value | None:
        """The value of an operand of an elementwise node, broadcast to it."""
        if isinstance(what, bool):
            return ALWAYS if what else NEVER
        if isinstance(what, int):
            return Affine(what)
        if isinstance(what, float):
            return constant(what)
        if not isinstance(what, fx.Node):
            return None
        if not is_tensor(what):
            return Affine(size_of(what)) if isinstance(what.meta.get("val"), torch.SymInt) else None
        shape = shape_of(what)
        own = index[len(index) - len(shape) :]
        return self(what, tuple(Affine() if same(size, 1) else entry for size, entry in zip(shape, own, strict=True)))


def _bindings(form: Form, index: Index) -> dict[Axis, Affine]:
    """What each axis of a form is at an index. Axes of merged dimensions are left out: an index does not tell them
    apart."""
    return {dim[0]: entry for dim, entry in zip(form.dims, index, strict=True) if len(dim) == 1}


def _index_of(read: Read, bindings: dict[Axis, Affine] | None) -> Index | None:
    """The index that a read takes if its axes are bound like this or, without bindings, stand for themselves."""
    index = []
    for digits in read.dims:
        entry = Affine()
        for digit in digits:
            place = Affine(digit.start)
            if digit.axis is not None:
                own = Affine(0, ((digit.axis, 1),)) if bindings is None else bindings.get(digit.axis)
                if own is None:
                    return None
                place = place + own * digit.step
            if entry != Affine() and not isinstance(digit.extent, int):
                return None
            entry = entry * digit.extent + place if isinstance(digit.extent, int) else place
        index.append(entry + Affine(digits[0].before) if digits else entry)
    return tuple(index)


def _after(value: Value | None, then: Sequence[Any]) -> Value | None:
    """A value after multiplications and casts, in order."""
    for step in then:
        if not isinstance(value, Conditional):
            return None
        value = value.map(partial(operator.mul, step) if isinstance(step, float) else partial(rounded, dtype=step))
    return value


def _scalar(node: fx.Node) -> Value | None:
    """The value of a tensor of one number that is a constant of the graph."""
    number, dtype = constant_of(node), node.meta["val"].dtype
    if number is None:
        return None
    return number_of(number, dtype)
