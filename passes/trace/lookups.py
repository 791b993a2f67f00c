"""Handlers of the ops that read through a table: pages of a cache, or its slots (see `lookup`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..algebra import operations
from ..algebra.gathers import Lookup, by_position, flatten, gather, look_up, within
from ..algebra.sizes import Size, Unaligned, same
from ..algebra.terms import Bits, Form
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of
from .handler import Forms, Handlers, lookup_of

HANDLERS = Handlers()


def flattened(trace: Forms, node: fx.Node, form: Form) -> Form:
    """The form of a view: a leaf of its own, if it lays pages that were looked up one behind the other, else `form`."""
    if not any(len(dim) > 1 for dim in form.dims):
        return form
    try:
        lookup = lookup_of(trace, form.term.read)
    except Unaligned:
        return form
    flat = None if lookup is None else flatten(lookup, node, form.dims)
    if flat is None:
        return form
    for other in trace.lookups:  # the same pages once more are the same tensor
        if other.target is node.target and arguments(other) == arguments(node):
            return trace[other]
    leaf, trace.lookups[node] = flat
    return leaf


def _along(trace: Forms, source: fx.Node, dim: int) -> Form:
    """The form of what is looked into; a leaf where its dimension is not one axis: slots, that is pages and rows."""
    form = trace[source]
    return form if len(form.dims[dim]) == 1 else operations.leaf(source, shape_of(source))


def _looked_up(trace: Forms, node: fx.Node, found: tuple[Form, Lookup]) -> Form:
    form, trace.lookups[node] = found
    return form


@HANDLERS.of(aten.index.Tensor)
def _index_tensor(trace: Forms, node: fx.Node) -> Form:
    source, indices = arguments(node)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype not in (torch.int64, torch.int32) for _, index in given):
        return operations.leaf(node, shape_of(node))
    if len(given) == 1:
        dim, index = given[0]
        return _looked_up(trace, node, look_up(node, _along(trace, source, dim), dim, trace[index], wraps=True))
    if [dim for dim, _ in given] == [0, 1]:
        return _index_by_position(trace, node, source, *(index for _, index in given))
    return operations.leaf(node, shape_of(node))


def _index_by_position(trace: Forms, node: fx.Node, source: fx.Node, page: fx.Node, row: fx.Node) -> Form:
    """`source[table[..., position // rows], position % rows]` for the positions from 0 on."""
    form = operations.fresh(trace[page])
    looked_up = form.term.read.source
    rows = trace[source].shape[1]
    if looked_up not in trace.lookups:
        return operations.leaf(node, shape_of(node))
    lookup = within(trace.lookups[looked_up], trace[looked_up], form.term.read)
    quotient = lookup.table.source
    whole = all(digit.whole for dim in lookup.table.dims for digit in dim)
    positions = _positions(quotient, aten.floor_divide.default, rows) if whole else None
    remainders = _positions(row, aten.remainder.Scalar, rows)
    alike = positions is not None and remainders is not None and same(positions, remainders)
    if not alike or lookup.table.axes != set(form.dims[-1]):
        return operations.leaf(node, shape_of(node))
    return _looked_up(trace, node, by_position(node, trace[source], form, lookup))


def _positions(node: Any, target: Any, divisor: Size) -> Size | None:
    """How many positions from 0 on a node divides by `divisor`, if it does."""
    if not isinstance(node, fx.Node) or node.target is not target or not isinstance(divisor, int):
        return None
    positions, by = arguments(node)[:2]
    if by != divisor or len(node.meta["val"].shape) != 1 or not isinstance(positions, fx.Node):
        return None
    match positions.target:
        case aten.arange.default:
            from_0 = True
        case aten.arange.start:
            from_0 = argument(positions, "start") == 0
        case aten.arange.start_step:
            from_0 = argument(positions, "start") == 0 and argument(positions, "step") == 1
        case _:
            from_0 = False
    return shape_of(positions)[0] if from_0 else None


@HANDLERS.of(aten.view.dtype)
def _view_dtype(trace: Forms, node: fx.Node) -> Form:
    """Bytes that were looked up are the numbers that they encode."""
    source, dtype = arguments(node)
    lookup = lookup_of(trace, trace[source].term.read)
    if (
        lookup is None
        or lookup.scales is not None
        or lookup.then
        or source.meta["val"].dtype.itemsize != dtype.itemsize
    ):
        return operations.leaf(node, shape_of(node))
    dims = trace[source].dims
    pages = replace(lookup.pages, then=(*lookup.pages.then, Bits(dtype)))
    return _looked_up(trace, node, (Form(dims, operations.read_of(node, dims)), replace(lookup, pages=pages)))


@HANDLERS.of(aten.index_select.default)
def _index_select(trace: Forms, node: fx.Node) -> Form:
    source, dim, index = arguments(node)
    dim %= len(trace[source].dims)
    return _looked_up(trace, node, look_up(node, _along(trace, source, dim), dim, trace[index], wraps=False))


@HANDLERS.of(aten.embedding.default)
def _embedding(trace: Forms, node: fx.Node) -> Form:
    source, index = arguments(node)[:2]
    return _looked_up(trace, node, look_up(node, _along(trace, source, 0), 0, trace[index], wraps=False))


@HANDLERS.of(aten.gather.default)
def _gather(trace: Forms, node: fx.Node) -> Form:
    source, dim, index = arguments(node)[:3]
    dim %= len(trace[source].dims)
    return _looked_up(trace, node, gather(node, trace[source], dim, trace[index]))
