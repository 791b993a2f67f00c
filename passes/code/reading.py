"""Turn reads back into torch code: the views, slices and casts that give a source tensor the axes that are wanted.

These functions run on fake tensors while their code is traced (`splicing`), so that torch handles symbolic sizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..algebra.made import side_by_side
from ..algebra.sizes import Size, Unaligned, product, same, symbols_in
from ..algebra.terms import (
    Added,
    Axis,
    Bits,
    Constant,
    Contracted,
    Digit,
    Dim,
    How,
    Joined,
    Laid,
    Named,
    Read,
    Scaled,
    Stacked,
    made_of,
)
from ..nodes.shapes import size_of

T = TypeVar("T")

Realize = Callable[[Size], "int | torch.SymInt"]
"""Gives the int or SymInt for a size."""


def realizer(values: Sequence[Any]) -> Realize:
    """A function that gives sizes as ints or, if they are symbolic, computes them from the sizes and SymInts in
    `values`."""
    known: dict[sympy.Expr, torch.SymInt] = {}
    for value in values:
        for size in value.shape if isinstance(value, Tensor) else (value,):
            known |= {expression: size for expression in _told_by(size) if expression not in known}

    def realize(size: Size) -> int | torch.SymInt:
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        if size in known:
            return known[size]
        return _evaluate(sympy.expand(size), {symbol: solve(symbol, ()) for symbol in size.free_symbols})

    def solve(symbol: sympy.Symbol, solving: tuple[sympy.Symbol, ...]) -> int | torch.SymInt:
        """The value of a symbol, from a known size that is linear in it; the symbols in its rest are solved first."""
        if symbol in known:
            return known[symbol]
        for expression, value in sorted(known.items(), key=lambda item: len(item[0].free_symbols)):
            parts = _linear(expression, symbol)
            if parts is None or parts[1].free_symbols & {symbol, *solving}:
                continue
            factor, rest = parts
            try:
                others = {other: solve(other, (*solving, symbol)) for other in rest.free_symbols}
            except Unaligned:
                continue
            left = value - _evaluate(rest, others) if rest != 0 else value
            return left // factor if factor != 1 else left
        written = _written_for(symbol, values)
        if written is not None and not written.free_symbols & {symbol, *solving}:
            return _evaluate(written, {other: solve(other, (*solving, symbol)) for other in written.free_symbols})
        raise Unaligned(f"no tensor at hand tells the size {symbol}")

    return realize


def symbols_of(read: Read) -> set[sympy.Symbol]:
    """The symbols in a read's sizes and starts, and in those of what it is made of."""
    sizes = [size for digit in read.digits for size in _sizes(digit)]
    return symbols_in(*sizes).union(*map(symbols_of, made_of(read.source)))


def _sizes(digit: Digit) -> tuple[Size, ...]:
    return digit.extent, digit.start, digit.before, digit.after, digit.axis.size if digit.axis is not None else 1


def sources_of(
    reads: Iterable[Read | None], node: fx.Node, dims: Sequence[Dim], more: Iterable[sympy.Symbol] = ()
) -> list[fx.Node]:
    """The nodes that code in the place of `node`, whose dimensions are `dims`, needs for its reads.

    `more` are symbols that it needs besides those of its reads.

    Raises:
        Unaligned: if the graph does not tell the sizes that this takes.
    """
    known = [read for read in reads if read is not None]
    symbols = symbols_in(*(axis.size for dim in dims for axis in dim)).union(*map(symbols_of, known), more)
    sources = [source for read in known for source in nodes_of(read)]
    return list(dict.fromkeys([*sources, *tellers(node, symbols)]))


def nodes_of(read: Read) -> list[fx.Node]:
    """The nodes of the graph that hold what is read."""
    if isinstance(read.source, fx.Node):
        return [read.source]
    return [node for part in made_of(read.source) for node in nodes_of(part)]


class Reader:
    """`read(what, *layout)`: the tensor that the read `what` names, as `read_as` lays it out.

    `values` are those of the nodes `sources`.
    """

    def __init__(self, sources: Sequence[fx.Node], values: Sequence[Any]) -> None:
        self.realize = realizer(values)
        self._place = dict(zip(sources, values, strict=True))

    def __call__(self, what: Read, *layout: Dim, broadcast: bool = True) -> Tensor:
        for place, dim in enumerate(layout):  # what is joined along one dimension is joined as it is laid out
            parts = side_by_side(what, dim) if len(dim) == 1 else []
            alike = broadcast or len({part.axes.difference(own) for part, own in parts}) == 1
            if len(parts) > 1 and alike and all({*own} <= part.axes for part, own in parts):
                before, after = layout[:place], layout[place + 1 :]
                pieces = [self(part, *before, own, *after, broadcast=broadcast) for part, own in parts]
                return torch.cat(pieces, dim=place)
        return read_as(self._source(what), what, layout, self.realize, broadcast=broadcast)

    def _source(self, read: Read) -> Tensor:
        """The tensor that is read; computed if it is not a tensor of the graph."""
        source = read.source
        if isinstance(source, fx.Node):
            tensor: Tensor = self._place[source]
            return tensor
        if isinstance(source, Contracted):
            return self._contracted(source)
        if isinstance(source, Constant):
            sizes = [self.realize(axis.size) for axis in source.axes]
            return self._source(source.like).new_full(sizes, source.number)
        if isinstance(source, Named):
            return self._named(source)
        if isinstance(source, Laid):
            return self(source.of, source.parts, *((axis,) for axis in source.others))
        assert isinstance(source, Scaled | Stacked | Joined | Added)
        dims = [(axis,) for axis in source.axes]
        if isinstance(source, Scaled):
            return changed(self(source.of, *dims), self(source.by, *dims, broadcast=False), source.how)
        if isinstance(source, Stacked):
            return torch.stack([self(piece, *dims) for piece in source.pieces])
        if isinstance(source, Joined):
            pieces = zip(source.pieces, source.along, strict=True)
            return torch.cat([self(piece, along, *dims) for piece, along in pieces])
        return sum_of([self(piece, *dims, broadcast=False) for piece in source.pieces])

    def _named(self, source: Named) -> Tensor:
        entry, *others = source.axes
        count: Any = self.realize(entry.size)
        table = self(source.table, *((axis,) for axis in others))
        indices = torch.arange(count, device=table.device).view(-1, *[1] * len(others))
        return (indices == torch.where(table < 0, table + count, table)).to(self(source.like).dtype)

    def _contracted(self, source: Contracted) -> Tensor:
        """A product of matrices, one for each index of the axes that both have."""
        left, right, summed = source.left, source.right, source.summed
        both = tuple(axis for axis in source.axes if axis in left.axes and axis in right.axes)
        rows = tuple(axis for axis in source.axes if axis in left.axes and axis not in both)
        columns = tuple(axis for axis in source.axes if axis in right.axes and axis not in both)
        product = wide(self(left, both, rows, summed)) @ wide(self(right, both, summed, columns))
        return write_as(product, (both, rows, columns), [(axis,) for axis in source.axes], self.realize)


def changed(of: Tensor, by: Tensor, how: How) -> Tensor:
    """What a tensor makes of another; a bool tensor also of elements that are NaN."""
    match how:
        case How.TIMES:
            return of * by
        case How.OVER:
            return of / by
        case How.WHERE:
            return torch.where(by, of, 0.0)
    return of.masked_fill(by, 0.0)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum, not rounded below float32 on the way: what is added to a weight is small beside it."""
    return functools.reduce(torch.add, map(wide, tensors))


def wide(tensor: Tensor) -> Tensor:
    """The tensor, in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tellers(node: fx.Node, symbols: set[sympy.Symbol]) -> list[fx.Node]:
    """Nodes before `node` whose values or shapes tell the symbols' values.

    Raises:
        Unaligned: if there is none for a symbol.
    """
    sizes: list[tuple[fx.Node, sympy.Expr]] = []
    found: dict[sympy.Symbol, list[fx.Node]] = {}
    for earlier in itertools.takewhile(lambda earlier: earlier is not node, node.graph.nodes):
        if symbols <= found.keys():
            break
        value = earlier.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else (value,):
            for expression in _told_by(size):
                sizes.append((earlier, expression))
                symbol, *others = expression.free_symbols
                if not others and symbol not in found and _linear(expression, symbol) is not None:
                    found[symbol] = [earlier]
    told = True
    while told and not symbols <= found.keys():  # a symbol may be in a size together with others that are known
        told = False
        for earlier, expression in sizes:
            for symbol in expression.free_symbols - found.keys():
                parts = _linear(expression, symbol)
                if parts is not None and parts[1].free_symbols <= found.keys():
                    found[symbol] = [earlier, *(t for other in parts[1].free_symbols for t in found[other])]
                    told = True
    values = [earlier.meta.get("val") for earlier in node.graph.nodes] if symbols - found.keys() else []
    written = {symbol: _written_for(symbol, values) for symbol in symbols - found.keys()}
    if missing := {symbol for symbol, of in written.items() if of is None or not of.free_symbols <= found.keys()}:
        raise Unaligned(f"nothing in the graph tells the sizes {sorted(map(str, missing))}")
    found |= {s: [t for other in of.free_symbols for t in found[other]] for s, of in written.items() if of is not None}
    return list(dict.fromkeys(teller for symbol in sorted(symbols & found.keys(), key=str) for teller in found[symbol]))


def _written_for(symbol: sympy.Symbol, values: Sequence[Any]) -> sympy.Expr | None:
    """What torch writes in place of a symbol since a guard, such as one of what was rewritten before, told it: a number
    or an expression of other symbols. None if there is nothing."""
    mode = torch._guards.detect_fake_mode(values)
    if mode is None or mode.shape_env is None:
        return None
    written: sympy.Expr = mode.shape_env.replace(symbol)
    return None if written == symbol else written


def _told_by(size: Any) -> Iterator[sympy.Expr]:
    """What a size is if it is symbolic: the expression that torch has for it, and what guards make of that."""
    if isinstance(size, torch.SymInt):
        for expression in (size.node.expr, sympy.sympify(size_of(size))):
            if expression.free_symbols:
                yield expression


def _linear(expression: sympy.Expr, symbol: sympy.Symbol) -> tuple[int, sympy.Expr] | None:
    """`factor, rest` if the expression is `factor * symbol + rest`, `factor` an integer and `rest` free of it."""
    factor = expression.coeff(symbol)
    rest = sympy.expand(expression - factor * symbol)
    return (int(factor), rest) if factor.is_Integer and factor != 0 and symbol not in rest.free_symbols else None


def _evaluate(size: sympy.Expr, values: dict[sympy.Symbol, int | torch.SymInt]) -> int | torch.SymInt:
    """An integer expression at these values of its symbols."""
    value: int | torch.SymInt = sympy_interp(PythonReferenceAnalysis, values, size)
    return value


def read_as(source: Tensor, read: Read, layout: Sequence[Dim], realize: Realize, *, broadcast: bool) -> Tensor:
    """The elements of `source` that `read` names, with a dimension for each entry of `layout`: the product of its axes.

    Axes that the read lacks are expanded if `broadcast`. Otherwise, a dimension has size 1 if the read has none of its
    axes.
    """
    units = _units(read.dims, layout) if broadcast else []  # else size 1 marks what it does not depend on
    dims, layout = _filled(read.dims, [Digit(unit, 1) for unit in units]), _filled(layout, units)
    digits = [digit for dim in dims for digit in dim]
    tensor = source
    for i in reversed(range(len(dims))):
        if len(dims[i]) == 0:
            tensor = tensor.squeeze(i)
            continue
        slowest = dims[i][0]
        if not (same(slowest.before, 0) and same(slowest.after, 0)):
            count = product(digit.extent for digit in dims[i])
            tensor = tensor.narrow(i, realize(slowest.before), realize(count))
        if len(dims[i]) > 1:
            tensor = tensor.unflatten(i, [realize(digit.extent) for digit in dims[i]])
    kept: list[Axis] = []
    for digit in digits:
        if digit.axis is None:
            tensor = tensor.select(len(kept), realize(digit.start))
            continue
        if not digit.whole:
            start = realize(digit.start)
            stop = start + realize(digit.axis.size) * digit.step - (digit.step - 1)
            tensor = tensor[(slice(None),) * len(kept) + (slice(start, stop, digit.step),)]
        kept.append(digit.axis)
    return _arrange(done(tensor, read.then), kept, layout, realize, broadcast)


def _units(has: Sequence[tuple[T, ...]], wanted: Sequence[Dim]) -> list[Axis]:
    """Axes for the dimensions of size 1 that both sides have, so that none is squeezed away and then put in again."""
    return [Axis(1) for _ in range(min(sum(not dim for dim in dims) for dims in (has, wanted)))]


def _filled(dims: Sequence[tuple[T, ...]], units: Sequence[T]) -> list[tuple[T, ...]]:
    """The dimensions, with `units` in the first of those that are empty."""
    supply = iter(units)
    return [dim or tuple(itertools.islice(supply, 1)) for dim in dims]


def done(tensor: Tensor, then: Sequence[Hashable]) -> Tensor:
    """A tensor, after the steps `then` of a read."""
    for step in then:
        if isinstance(step, float):
            tensor = tensor * step
        elif isinstance(step, Bits):
            assert isinstance(step.dtype, torch.dtype)
            tensor = tensor.view(step.dtype)
        else:
            assert isinstance(step, torch.dtype)
            tensor = tensor.to(step)
    return tensor


def _arrange(tensor: Tensor, axes: list[Axis], layout: Sequence[Dim], realize: Realize, broadcast: bool) -> Tensor:
    wanted = [axis for dim in layout for axis in dim]
    missing = [axis for axis in wanted if axis not in axes]
    assert set(axes) <= set(wanted), "an axis that the layout has no place for"
    order = [axes.index(axis) for axis in wanted if axis in axes]
    if order != sorted(order):
        tensor = tensor.permute(order)
    for place, axis in enumerate(wanted):
        if axis in missing:
            tensor = tensor.unsqueeze(place)
    full = {axis for dim in layout for axis in dim if broadcast or any(a not in missing for a in dim)}
    if any(axis in full for axis in missing):
        tensor = tensor.expand([realize(axis.size) if axis in missing and axis in full else -1 for axis in wanted])
    for i, dim in enumerate(layout):
        if not dim:
            tensor = tensor.unsqueeze(i)
        elif len(dim) > 1:
            tensor = tensor.flatten(i, i + len(dim) - 1)
    return tensor


def write_as(tensor: Tensor, layout: Sequence[Dim], dims: Sequence[Dim], realize: Realize) -> Tensor:
    """A tensor whose dimensions are `layout`, arranged so that they are `dims`, over the same axes."""
    units = _units(layout, dims)
    layout, dims = _filled(layout, units), _filled(dims, units)
    axes = [axis for dim in layout for axis in dim]
    for i in reversed(range(len(layout))):
        if not layout[i]:
            tensor = tensor.squeeze(i)
        elif len(layout[i]) > 1:
            tensor = tensor.unflatten(i, [realize(axis.size) for axis in layout[i]])
    return _arrange(tensor, axes, dims, realize, broadcast=True)
