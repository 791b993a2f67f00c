"""Handlers of ops that take a part of a tensor."""

from __future__ import annotations

import operator
import sys
from typing import Any

from torch import fx

from ..algebra import operations
from ..algebra.sizes import Size, Unaligned, known_at_most, product, total
from ..algebra.terms import Form
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of, size_of
from ..nodes.source import where
from .handler import Forms, Handlers

HANDLERS = Handlers()


def start_of(value: Any, end: Any, whole: Size, size: Size) -> Size:
    """Where a slice of `size` indices begins, as torch clamps it.

    A slice that runs to the end begins `size` before the end, whatever start was given.
    """
    start = 0 if value is None else size_of(value)
    stop = whole if end is None else size_of(end)
    if known_at_most(whole, stop) or known_at_most(sys.maxsize, stop):
        return total([whole, -size])
    return index_of(start, whole, clamp=True)


def index_of(index: Size, whole: Size, clamp: bool = False) -> Size:
    """An index counted from the front, given one that may count from the end."""
    if known_at_most(0, index):
        return index
    from_end = total([index, whole])
    if known_at_most(index, -1) and (not clamp or known_at_most(0, from_end)):
        return from_end
    if clamp and known_at_most(from_end, 0):
        return 0
    raise Unaligned(f"an index {index} of {whole} that may count from the end")


@HANDLERS.of(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = argument(node, "dim") % len(source.dims)
    whole, size, step = source.shape[dim], shape_of(node)[dim], argument(node, "step")
    end = argument(node, "end") if step == 1 else 0
    start = start_of(argument(node, "start"), end, whole, size)
    return operations.take(source, dim, start, size, step)


@HANDLERS.of(aten.narrow_copy.default)
def _narrow(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = arguments(node)[1] % len(source.dims)
    start = index_of(size_of(arguments(node)[2]), source.shape[dim])
    return operations.take(source, dim, start, shape_of(node)[dim])


@HANDLERS.of(aten.unfold.default, aten.unfold_copy.default)
def _unfold(trace: Forms, node: fx.Node) -> Form:
    """Windows that do not overlap are the rows of a view, or the first columns of these rows."""
    source, dim, size, step = arguments(node)
    form, count = trace[source], shape_of(node)[dim]
    dim %= len(form.dims)
    if not known_at_most(size, step):
        raise Unaligned("windows that overlap")
    if not known_at_most(product([count, step]), form.shape[dim]):
        raise Unaligned(f"windows {step} apart and {size} wide, the last of which has no full step behind it")
    windows = operations.take(form, dim, 0, product([count, step]))
    shape = windows.shape
    windows = operations.view(windows, (*shape[:dim], count, step, *shape[dim + 1 :]))
    order = [i for i in range(len(shape) + 1) if i != dim + 1]
    return operations.take(operations.permute(windows, [*order, dim + 1]), len(shape), 0, size)


@HANDLERS.of(aten.select.int, aten.select_copy.int)
def _select(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = arguments(node)[1] % len(source.dims)
    return operations.select(source, dim, index_of(size_of(arguments(node)[2]), source.shape[dim]))


UNBINDS = {aten.unbind.int, aten.unbind_copy.int}
SPLITS = {
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


@HANDLERS.of(operator.getitem)
def _getitem(trace: Forms, node: fx.Node) -> Form:
    parent, index = arguments(node)
    if parent.target in UNBINDS:
        source = trace[arguments(parent)[0]]
        return operations.select(source, argument(parent, "dim") % len(source.dims), index)
    if parent.target in SPLITS:
        source = trace[arguments(parent)[0]]
        dim = argument(parent, "dim") % len(source.dims)
        sizes = [size_of(piece.shape[dim]) for piece in parent.meta["val"]]
        return operations.take(source, dim, sum(sizes[:index], 0), sizes[index])
    raise Unaligned(f"a result of {where(parent)}")
