"""Handlers of the ops that read through a table: pages of a cache, or its slots (see `algebra/gathers`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from ..algebra import operations
from ..algebra.gathers import by_position, gather, look_up, lookup_of
from ..algebra.sizes import Size, Unaligned, same
from ..algebra.terms import Bits, Form
from ..nodes.arguments import INTEGERS, arguments, aten
from ..nodes.guards import equal_by_guard
from ..nodes.shapes import shape_of
from . import halves
from .handler import Forms, Handlers
from .ranges import first_of

HANDLERS = Handlers()


def _along(trace: Forms, source: fx.Node, dim: int) -> Form:
    """The form of the tensor to look up in; a leaf if dimension `dim` is not one axis: slots, which are pages and
    rows."""
    form = trace[source]
    return form if len(form.dims[dim]) == 1 else operations.leaf(source, shape_of(source))


@HANDLERS.of(aten.index.Tensor)
def _index_tensor(trace: Forms, node: fx.Node) -> Form:
    source, indices = arguments(node)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype not in INTEGERS for _, index in given):
        raise Unaligned("an index that is not an integer")
    if len(given) == 1:
        dim, index = given[0]
        return look_up(node, _along(trace, source, dim), dim, trace[index], wraps=True)
    if [dim for dim, _ in given] == [0, 1]:
        return _index_by_position(trace, node, source, *(index for _, index in given))
    raise Unaligned("several indices that are not a page and a row of it")


def _index_by_position(trace: Forms, node: fx.Node, source: fx.Node, page: fx.Node, row: fx.Node) -> Form:
    """`source[table[..., position // rows], position % rows]`, for positions from 0 on."""
    form = operations.fresh(trace[page])
    rows = source.meta["val"].shape[1]
    lookup = lookup_of(form.term)
    if lookup is None or lookup.pages.then:
        raise Unaligned("several indices that are not a page and a row of it")
    quotient = lookup.table.source
    positions = _positions(quotient, _QUOTIENTS, rows) if lookup.table.whole else None
    remainders = _positions(row, (aten.remainder.Scalar,), rows)
    alike = positions is not None and remainders is not None and same(positions, remainders)
    if not alike or lookup.table.axes != set(form.dims[-1]):
        raise Unaligned("several indices that are not a page and a row of it")
    return by_position(node, trace[source], form, lookup)


_QUOTIENTS = aten.floor_divide.default, aten.div.Tensor_mode
"""Ops that give whole quotients of positions; of positions from 0 on, rounded down and truncated ones are the same."""


def _positions(node: Any, targets: tuple[Any, ...], divisor: Any) -> Size | None:
    """How many positions, from 0 on, `node` divides by `divisor` with one of the ops `targets`; None if that is not
    what it does.

    A page size that is a number on one side and a symbol on the other, or two symbols, is guarded to be one.
    """
    if not isinstance(node, fx.Node) or node.target not in targets or node.kwargs.get("rounding_mode", "") is None:
        return None
    positions, by = arguments(node)[:2]
    if len(node.meta["val"].shape) != 1 or not isinstance(positions, fx.Node) or not equal_by_guard(by, divisor):
        return None
    return shape_of(positions)[0] if first_of(positions) == 0 else None


@HANDLERS.of(aten.view.dtype, aten.view_copy.dtype)
def _view_dtype(trace: Forms, node: fx.Node) -> Form:
    """Bytes that were looked up become the numbers that they encode."""
    source, dtype = arguments(node)
    if (kept := halves.kept_by_view(trace, node)) is not None:
        return kept
    lookup = lookup_of(trace[source].term)
    if (
        lookup is None
        or halves.are_taken_apart(lookup)
        or lookup.scales is not None
        or lookup.then
        or source.meta["val"].dtype.itemsize != dtype.itemsize
    ):
        raise Unaligned("a view of bits as another dtype")
    dims = trace[source].dims
    pages = replace(lookup.pages, then=(*lookup.pages.then, Bits(dtype)))
    return Form(dims, replace(operations.read_of(node, dims), stored=replace(lookup, pages=pages)))


@HANDLERS.of(aten.index_select.default)
def _index_select(trace: Forms, node: fx.Node) -> Form:
    source, dim, index = arguments(node)
    dim %= len(trace[source].dims)
    return look_up(node, _along(trace, source, dim), dim, trace[index], wraps=False)


@HANDLERS.of(aten.embedding.default)
def _embedding(trace: Forms, node: fx.Node) -> Form:
    source, index = arguments(node)[:2]
    return look_up(node, _along(trace, source, 0), 0, trace[index], wraps=False)


@HANDLERS.of(aten.gather.default)
def _gather(trace: Forms, node: fx.Node) -> Form:
    source, dim, index = arguments(node)[:3]
    dim %= len(trace[source].dims)
    return gather(node, trace[source], dim, trace[index])
