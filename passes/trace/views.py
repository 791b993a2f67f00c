"""Handlers of ops that move elements and change none."""

from __future__ import annotations

from torch import fx

from ..algebra import operations
from ..algebra.terms import Form
from ..nodes.arguments import arguments, aten
from ..nodes.shapes import shape_of, size_of
from .handler import Forms, Handlers
from .lookups import flattened

HANDLERS = Handlers()


@HANDLERS.of(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
def _same(trace: Forms, node: fx.Node) -> Form:
    return trace[arguments(node)[0]]


@HANDLERS.of(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.unflatten.int,
)
def _view(trace: Forms, node: fx.Node) -> Form:
    form = operations.view(trace[arguments(node)[0]], shape_of(node))
    return flattened(trace, node, form)


@HANDLERS.of(aten.permute.default)
def _permute(trace: Forms, node: fx.Node) -> Form:
    return operations.permute(trace[arguments(node)[0]], [d % len(arguments(node)[1]) for d in arguments(node)[1]])


@HANDLERS.of(aten.transpose.int)
def _transpose(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    order = list(range(len(source.dims)))
    a, b = arguments(node)[1], arguments(node)[2]
    order[a], order[b] = order[b], order[a]
    return operations.permute(source, order)


@HANDLERS.of(aten.t.default)
def _t(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    return operations.permute(source, range(len(source.dims))[::-1])


@HANDLERS.of(aten.expand.default)
def _expand(trace: Forms, node: fx.Node) -> Form:
    return operations.expand(trace[arguments(node)[0]], shape_of(node))


@HANDLERS.of(aten.repeat.default)
def _repeat(trace: Forms, node: fx.Node) -> Form:
    return operations.repeat(trace[arguments(node)[0]], [size_of(count) for count in arguments(node)[1]])
