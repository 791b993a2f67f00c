"""Handlers of ops that take a part of a tensor."""

from __future__ import annotations

import operator
import sys
from typing import Any

from torch import fx

from ..algebra import operations
from ..algebra.sizes import Size, Unaligned, same, total
from ..algebra.terms import Form
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of, size_of
from .handler import Forms, Handlers

HANDLERS = Handlers()


def start_of(value: Any, end: Any, whole: Size, size: Size) -> Size:
    """Where a slice of `size` indices begins, as torch clamps it.

    A slice that runs to the end begins `size` before it, whatever was asked for.
    """
    start = 0 if value is None else size_of(value)
    stop = whole if end is None else size_of(end)
    if same(stop, whole) or (isinstance(stop, int) and stop >= sys.maxsize):
        return total([whole, -size])
    return index_of(start, whole, clamp=True)


def index_of(index: Size, whole: Size, clamp: bool = False) -> Size:
    """An index that counts from the front, given one that may count from the end."""
    if isinstance(index, int):
        if index >= 0:
            return index
        if isinstance(whole, int):
            return max(index + whole, 0) if clamp else index + whole
        if not clamp:
            return total([index, whole])
    elif index.is_nonnegative:
        return index
    raise Unaligned(f"an index {index} of {whole} that may count from the end")


@HANDLERS.of(aten.slice.Tensor)
def _slice(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = argument(node, "dim") % len(source.dims)
    whole, size, step = source.shape[dim], shape_of(node)[dim], argument(node, "step")
    end = argument(node, "end") if step == 1 else 0
    start = start_of(argument(node, "start"), end, whole, size)
    return operations.take(source, dim, start, size, step)


@HANDLERS.of(aten.select.int)
def _select(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = arguments(node)[1] % len(source.dims)
    return operations.select(source, dim, index_of(size_of(arguments(node)[2]), source.shape[dim]))


@HANDLERS.of(operator.getitem)
def _getitem(trace: Forms, node: fx.Node) -> Form:
    parent, index = arguments(node)
    if parent.target is aten.unbind.int:
        source = trace[arguments(parent)[0]]
        return operations.select(source, argument(parent, "dim") % len(source.dims), index)
    if parent.target in (aten.split.Tensor, aten.split_with_sizes.default):
        source = trace[arguments(parent)[0]]
        dim = argument(parent, "dim") % len(source.dims)
        sizes = [size_of(piece.shape[dim]) for piece in parent.meta["val"]]
        return operations.take(source, dim, sum(sizes[:index], 0), sizes[index])
    return operations.leaf(node, shape_of(node))
