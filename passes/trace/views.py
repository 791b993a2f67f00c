"""Handlers of ops that move elements and change none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..algebra import operations
from ..algebra.gathers import flatten
from ..algebra.joins import stacked
from ..algebra.sizes import Size, Unaligned, quotient
from ..algebra.terms import Form
from ..nodes.arguments import arguments, aten
from ..nodes.gradients import ends_gradients
from ..nodes.shapes import shape_of, size_of
from .handler import Forms, Handlers

HANDLERS = Handlers()


@HANDLERS.of(
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_copy.default,
)
def _same(trace: Forms, node: fx.Node) -> Form:
    if ends_gradients(node):
        raise Unaligned("gradients end here")
    return trace[arguments(node)[0]]


@HANDLERS.of(aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
def _lifted(trace: Forms, node: fx.Node) -> Form:
    """A copy of a constant is a source itself: code that reads the constant cannot be traced under fake tensors."""
    (constant,) = node.all_input_nodes
    return operations.leaf(node, shape_of(node)) if constant.op == "get_attr" else trace[constant]


@HANDLERS.of(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze_copy.default,
    aten.squeeze.dim,
    aten.squeeze_copy.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.dims,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    aten.unflatten.int,
)
def _view(trace: Forms, node: fx.Node) -> Form:
    form = operations.view(trace[arguments(node)[0]], shape_of(node))
    form = replace(form, term=stacked(form.term))
    return flatten(node, form) or form


@HANDLERS.of(aten.permute.default, aten.permute_copy.default)
def _permute(trace: Forms, node: fx.Node) -> Form:
    return operations.permute(trace[arguments(node)[0]], [d % len(arguments(node)[1]) for d in arguments(node)[1]])


@HANDLERS.of(aten.transpose.int, aten.transpose_copy.int)
def _transpose(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    order = list(range(len(source.dims)))
    a, b = arguments(node)[1], arguments(node)[2]
    order[a], order[b] = order[b], order[a]
    return operations.permute(source, order)


@HANDLERS.of(aten.t.default, aten.t_copy.default)
def _t(trace: Forms, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    return operations.permute(source, range(len(source.dims))[::-1])


@HANDLERS.of(aten.expand.default, aten.expand_copy.default)
def _expand(trace: Forms, node: fx.Node) -> Form:
    return operations.expand(trace[arguments(node)[0]], shape_of(node))


@HANDLERS.of(aten.repeat.default)
def _repeat(trace: Forms, node: fx.Node) -> Form:
    return operations.repeat(trace[arguments(node)[0]], [size_of(count) for count in arguments(node)[1]])


@HANDLERS.of(aten.channel_shuffle.default)
def _channel_shuffle(trace: Forms, node: fx.Node) -> Form:
    source, groups = trace[arguments(node)[0]], arguments(node)[1]
    batch, channels, *rest = source.shape
    each = quotient(channels, groups)
    if each is None:
        raise Unaligned(f"{channels} channels in {groups} groups")
    return _through(source, (batch, groups, each, *rest), (0, 2, 1, *range(3, len(rest) + 3)), shape_of(node))


@HANDLERS.of(aten.pixel_shuffle.default)
def _pixel_shuffle(trace: Forms, node: fx.Node) -> Form:
    """`[..., C r r, H, W]` as `[..., C, H r, W r]`."""
    source, factor = trace[arguments(node)[0]], arguments(node)[1]
    *batch, _, height, width = source.shape
    channels, n = shape_of(node)[-3], len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return _through(source, (*batch, channels, factor, factor, height, width), order, shape_of(node))


@HANDLERS.of(aten.pixel_unshuffle.default)
def _pixel_unshuffle(trace: Forms, node: fx.Node) -> Form:
    """`[..., C, H r, W r]` as `[..., C r r, H, W]`."""
    source, factor = trace[arguments(node)[0]], arguments(node)[1]
    *batch, channels, _, _ = source.shape
    (height, width), n = shape_of(node)[-2:], len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return _through(source, (*batch, channels, height, factor, width, factor), order, shape_of(node))


def _through(form: Form, divided: Sequence[Size], order: Sequence[int], shape: Sequence[Size]) -> Form:
    """The elements under the shape `divided`, with the dimensions permuted to `order`, viewed under `shape`."""
    return operations.view(operations.permute(operations.view(form, divided), order), shape)
