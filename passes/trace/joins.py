"""Handlers of ops that put parts together."""

from __future__ import annotations

from torch import fx

from ..algebra import operations
from ..algebra.sizes import same, total
from ..algebra.terms import Form, Term, Undefined
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of
from .handler import Forms, Handlers
from .parts import start_of

HANDLERS = Handlers()


@HANDLERS.of(aten.cat.default)
def _cat(trace: Forms, node: fx.Node) -> Form:
    dim = argument(node, "dim") % len(shape_of(node))
    pieces = [trace[piece] for piece in arguments(node)[0] if len(shape_of(piece)) == len(shape_of(node))]
    if len(pieces) != len(arguments(node)[0]) or len({p.meta["val"].dtype for p in arguments(node)[0]}) > 1:
        return operations.leaf(node, shape_of(node))
    return pieces[0] if len(pieces) == 1 else operations.join(node, pieces, dim)


@HANDLERS.of(aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_permuted.default)
def _empty(trace: Forms, node: fx.Node) -> Form:
    form = operations.leaf(node, shape_of(node))
    return Form(form.dims, Term(form.term.read, Undefined()))


@HANDLERS.of(aten.copy.default)
def _copy(trace: Forms, node: fx.Node) -> Form:
    target, source = arguments(node)[:2]
    before, after = source.meta["val"].dtype, target.meta["val"].dtype
    if source.meta["val"].device != target.meta["val"].device or (
        before != after and not (before.is_floating_point and after.is_floating_point)
    ):
        return operations.leaf(node, shape_of(node))
    form = operations.expand(trace[source], shape_of(node))
    return form if before == after else operations.cast(form, after)


@HANDLERS.of(aten.slice_scatter.default)
def _slice_scatter(trace: Forms, node: fx.Node) -> Form:
    target, source = trace[arguments(node)[0]], trace[arguments(node)[1]]
    whole = shape_of(node)
    dim = argument(node, "dim") % len(whole)
    size = source.shape[dim]
    start = start_of(argument(node, "start"), argument(node, "end"), whole[dim], size)
    if argument(node, "step") != 1:
        return operations.leaf(node, whole)
    after = total([whole[dim], -start, -size])
    pieces = [] if same(start, 0) else [operations.take(target, dim, 0, start)]
    pieces.append(source)
    if not same(after, 0):
        pieces.append(operations.take(target, dim, start + size, after))
    return source if len(pieces) == 1 else operations.join(node, pieces, dim)
