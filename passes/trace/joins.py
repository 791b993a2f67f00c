"""Handlers of ops that put parts together: they join tensors, make them, or write a part of one."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..algebra import joins, operations
from ..algebra.sizes import Size, Unaligned, known_at_most, same, total
from ..algebra.terms import Form, Term, Undefined, Zero
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of, size_of
from .halves import of_whole_bytes
from .handler import Forms, Handlers
from .parts import index_of, start_of
from .ranges import first_of

HANDLERS = Handlers()


@HANDLERS.of(aten.cat.default)
def _cat(trace: Forms, node: fx.Node) -> Form:
    dim = argument(node, "dim") % len(shape_of(node))
    joined = [piece for piece in arguments(node)[0] if not _is_nothing(piece)] or arguments(node)[0]
    if any(len(shape_of(piece)) != len(shape_of(node)) for piece in joined):
        raise Unaligned("pieces of different ranks")
    pieces = [_as_held(trace, piece, node) for piece in joined]
    return pieces[0] if len(pieces) == 1 else _joined(node, pieces, dim)


def _is_nothing(piece: fx.Node) -> bool:
    """Whether torch leaves a piece of a join out, whatever the dimensions of the others: transformers' caches begin
    with it."""
    sizes = shape_of(piece)
    return len(sizes) == 1 and same(sizes[0], 0)


@HANDLERS.of(aten.stack.default)
def _stack(trace: Forms, node: fx.Node) -> Form:
    dim = argument(node, "dim") % len(shape_of(node))
    return _joined(node, [_unsqueezed(_as_held(trace, piece, node), dim) for piece in arguments(node)[0]], dim)


def _joined(node: fx.Node, pieces: list[Form], dim: int) -> Form:
    return of_whole_bytes(node, pieces, dim) or joins.join(node, pieces, dim)


@HANDLERS.of(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def _empty(trace: Forms, node: fx.Node) -> Form:
    form = operations.leaf(node, shape_of(node))
    return Form(form.dims, Term(form.term.read, Undefined()))


@HANDLERS.of(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def _zeros(trace: Forms, node: fx.Node) -> Form:
    form = operations.leaf(node, shape_of(node))
    return Form(form.dims, Term(form.term.read, Zero())) if node.meta["val"].dtype.is_floating_point else form


@HANDLERS.of(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def _full(trace: Forms, node: fx.Node) -> Form:
    value = argument(node, "value" if node.target is aten.fill.Scalar else "fill_value")
    return _zeros(trace, node) if value in (0, False) else operations.leaf(node, shape_of(node))


@HANDLERS.of(aten.copy.default)
def _copy(trace: Forms, node: fx.Node) -> Form:
    target, source = arguments(node)[:2]
    return operations.expand(_as_held(trace, source, target), shape_of(node))


@HANDLERS.of(aten.slice_scatter.default)
def _slice_scatter(trace: Forms, node: fx.Node) -> Form:
    target, source = arguments(node)[:2]
    dim = argument(node, "dim") % len(shape_of(node))
    whole, size = shape_of(node)[dim], shape_of(source)[dim]
    held, step = _as_held(trace, source, target), argument(node, "step")
    if step != 1:
        return _written_every(node, trace[target], held, dim, step)
    start = start_of(argument(node, "start"), argument(node, "end"), whole, size)
    return _written(node, trace[target], held, dim, start)


@HANDLERS.of(aten.select_scatter.default)
def _select_scatter(trace: Forms, node: fx.Node) -> Form:
    target, source, dim, index = arguments(node)
    dim %= len(shape_of(node))
    start = index_of(size_of(index), shape_of(node)[dim])
    return _written(node, trace[target], _unsqueezed(_as_held(trace, source, target), dim), dim, start)


@HANDLERS.of(aten.index_copy.default)
def _index_copy(trace: Forms, node: fx.Node) -> Form:
    target, dim, index, source = arguments(node)
    start = _first(trace[index], 0)
    return _written(node, trace[target], _as_held(trace, source, target), dim % len(shape_of(node)), start)


@HANDLERS.of(aten.index_put.default)
def _index_put(trace: Forms, node: fx.Node) -> Form:
    target, indices, source = arguments(node)[:3]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or len(shape_of(given[0][1])) != 1 or argument(node, "accumulate"):
        raise Unaligned("a write by several indices, or one that adds")
    ((dim, index),) = given
    shape = (*shape_of(node)[:dim], shape_of(index)[0], *shape_of(node)[dim + 1 :])
    source = operations.expand(_as_held(trace, source, target), shape)
    return _written(node, trace[target], source, dim, _first(trace[index], 0))


@HANDLERS.of(aten.scatter.src)
def _scatter(trace: Forms, node: fx.Node) -> Form:
    target, dim, index, source = arguments(node)[:4]
    dim %= len(shape_of(node))
    others = [(a, b) for i, (a, b) in enumerate(zip(shape_of(node), shape_of(index), strict=True)) if i != dim]
    sizes = [*others, *zip(shape_of(index), shape_of(source), strict=True)]
    if any(not same(a, b) for a, b in sizes):
        raise Unaligned("a write to only a part of the rows")
    return _written(node, trace[target], _as_held(trace, source, target), dim, _first(trace[index], dim))


def _as_held(trace: Forms, source: fx.Node, target: fx.Node) -> Form:
    """The form of what is written to `target`, in the dtype of `target`."""
    before, after = source.meta["val"].dtype, target.meta["val"].dtype
    if source.meta["val"].device != target.meta["val"].device or (
        before != after and not (before.is_floating_point and after.is_floating_point)
    ):
        raise Unaligned("a copy to another device or kind of dtype")
    return trace[source] if before == after else operations.cast(trace[source], after)


def _unsqueezed(form: Form, dim: int) -> Form:
    return Form((*form.dims[:dim], (), *form.dims[dim:]), form.term)


def _first(index: Form, dim: int) -> Size:
    """The first of the places that `index` names along its dimension `dim`, one behind the other.

    Raises: Unaligned, if they are not known to be one behind the other, or if the first may count from the end.
    """
    read, axes = index.term.read, index.dims[dim]
    first = None if read.then else first_of(read.source)
    if first is None:
        raise Unaligned("positions that are known only at run time")
    (digits,) = read.dims
    if digits:
        slowest = digits[0]
        if len(digits) > 1 or slowest.step != 1 or axes != (() if slowest.axis is None else (slowest.axis,)):
            raise Unaligned("positions that are not consecutive")
        first = total([first, slowest.before, slowest.start])
    elif axes:
        raise Unaligned("positions that are the same")
    if not known_at_most(0, first):
        raise Unaligned(f"an index {first} that may count from the end")
    return first


def _written_every(node: fx.Node, target: Form, source: Form, dim: int, step: Size) -> Form:
    """`target` with `source` written to every index of dimension `dim` that is one number modulo `step`, as ropes write
    to even and to odd columns: the columns of a view with `step` of them in a row."""
    start, size = size_of(argument(node, "start") or 0), source.shape[dim]
    if not (known_at_most(0, start) and known_at_most(start + 1, step)) or not same(size * step, target.shape[dim]):
        raise Unaligned("a write to a slice with a step, in part")
    rows = operations.view(target, (*target.shape[:dim], size, step, *target.shape[dim + 1 :]))
    written = operations.view(_written(node, rows, _unsqueezed(source, dim + 1), dim + 1, start), target.shape)
    if written.term.read.source is not node:
        return written
    read = operations.read_of(node, written.dims, written.term.axes).read
    return replace(written, term=replace(written.term, read=read))


def _written(node: fx.Node, target: Form, source: Form, dim: int, start: Size) -> Form:
    """`target` with `source` written to it, from `start` of dimension `dim` on."""
    whole, size = target.shape[dim], source.shape[dim]
    after = total([whole, -start, -size])
    pieces = [] if same(start, 0) else [operations.take(target, dim, 0, start)]
    pieces.append(source)
    if not same(after, 0):
        pieces.append(operations.take(target, dim, start + size, after))
    return source if len(pieces) == 1 else joins.join(node, pieces, dim)
