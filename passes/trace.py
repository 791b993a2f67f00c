"""Provenance: the `Form` of every tensor of a functional ATen graph.

One walk over the graph in order, one handler for each kind of op. What no handler knows, or what does not factor
into axes, is a leaf: nothing but a tensor of its shape.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._ordered_set import OrderedSet

from . import layout
from .axes import Form, Size, Term, Unaligned, Undefined, Unread, same, total
from .dequantize import dequantized
from .in_fp8 import Numbers, dequantized_read, in_fp8
from .lookup import Lookup
from .sizes import shape_of, size_of
from .twins import Twins

aten = torch.ops.aten


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments, which fx types as anything that a graph may hold."""
    return node.args


def is_tensor(node: Any) -> bool:
    """Whether `node` is a graph node that holds one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


class Trace:
    """The forms of a graph's tensors, by node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._forms: dict[fx.Node, Form] = {}
        self.lookups: dict[fx.Node, Lookup] = {}
        """What the nodes that read through a table are made of, over the axes of their forms."""
        self.numbers: dict[fx.Node, Numbers] = {}
        """Likewise of products of a tensor in FP8 and its scales."""
        twins = Twins()
        for node in graph.nodes:
            first = twins.first(node)
            if is_tensor(node):
                self._forms[node] = self._describe(node) if first is node else self._forms[first]

    def __getitem__(self, node: fx.Node) -> Form:
        return self._forms[node]

    def _describe(self, node: fx.Node) -> Form:
        if node.op == "call_function":
            handler = HANDLERS.get(node.target)
            if handler is None and _is_pointwise(node.target):
                handler = _pointwise
            if handler is not None:
                try:
                    return handler(self, node)
                except Unaligned:
                    pass
        return layout.leaf(node, shape_of(node))


Handler = Callable[[Trace, fx.Node], Form]
HANDLERS: dict[Any, Handler] = {}


def handles(*targets: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node is a function of each element of its broadcast operands by itself, casts included."""
    return _is_pointwise(node.target) or node.target is aten._to_copy.default


def _is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return arguments(node)[index] if len(arguments(node)) > index else node.kwargs.get(name, default)


def _start(value: Any, end: Any, whole: Size, size: Size) -> Size:
    """Where a slice of `size` indices begins, as torch clamps it.

    A slice that runs to the end begins `size` before it, whatever was asked for.
    """
    start = 0 if value is None else size_of(value)
    stop = whole if end is None else size_of(end)
    if same(stop, whole) or (isinstance(stop, int) and stop >= sys.maxsize):
        return total([whole, -size])
    return _index(start, whole, clamp=True)


def _index(index: Size, whole: Size, clamp: bool = False) -> Size:
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


# Ops that move nothing


@handles(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
def _same(trace: Trace, node: fx.Node) -> Form:
    return trace[arguments(node)[0]]


@handles(aten._to_copy.default)
def _cast(trace: Trace, node: fx.Node) -> Form:
    source = arguments(node)[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if node.meta["val"].device != source.meta["val"].device:
        return layout.leaf(node, shape_of(node))
    if before == after:
        return trace[source]
    if not (before.is_floating_point and after.is_floating_point):
        return _pointwise(trace, node)
    return layout.cast(trace[source], after)


@handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.unflatten.int,
)
def _view(trace: Trace, node: fx.Node) -> Form:
    form = layout.view(trace[arguments(node)[0]], shape_of(node))
    return flattened(trace, node, form)


@handles(aten.permute.default)
def _permute(trace: Trace, node: fx.Node) -> Form:
    return layout.permute(trace[arguments(node)[0]], [d % len(arguments(node)[1]) for d in arguments(node)[1]])


@handles(aten.transpose.int)
def _transpose(trace: Trace, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    order = list(range(len(source.dims)))
    a, b = arguments(node)[1], arguments(node)[2]
    order[a], order[b] = order[b], order[a]
    return layout.permute(source, order)


@handles(aten.t.default)
def _t(trace: Trace, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    return layout.permute(source, range(len(source.dims))[::-1])


@handles(aten.expand.default)
def _expand(trace: Trace, node: fx.Node) -> Form:
    return layout.expand(trace[arguments(node)[0]], shape_of(node))


@handles(aten.repeat.default)
def _repeat(trace: Trace, node: fx.Node) -> Form:
    return layout.repeat(trace[arguments(node)[0]], [size_of(count) for count in arguments(node)[1]])


# Ops that take a part


@handles(aten.slice.Tensor)
def _slice(trace: Trace, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = argument(node, 1, "dim", 0) % len(source.dims)
    whole, size, step = source.shape[dim], shape_of(node)[dim], argument(node, 4, "step", 1)
    end = argument(node, 3, "end") if step == 1 else 0
    start = _start(argument(node, 2, "start"), end, whole, size)
    return layout.take(source, dim, start, size, step)


@handles(aten.select.int)
def _select(trace: Trace, node: fx.Node) -> Form:
    source = trace[arguments(node)[0]]
    dim = arguments(node)[1] % len(source.dims)
    return layout.select(source, dim, _index(size_of(arguments(node)[2]), source.shape[dim]))


@handles(operator.getitem)
def _getitem(trace: Trace, node: fx.Node) -> Form:
    parent, index = arguments(node)
    if parent.target is aten.unbind.int:
        source = trace[arguments(parent)[0]]
        return layout.select(source, argument(parent, 1, "dim", 0) % len(source.dims), index)
    if parent.target in (aten.split.Tensor, aten.split_with_sizes.default):
        source = trace[arguments(parent)[0]]
        dim = argument(parent, 2, "dim", 0) % len(source.dims)
        sizes = [size_of(piece.shape[dim]) for piece in parent.meta["val"]]
        return layout.take(source, dim, sum(sizes[:index], 0), sizes[index])
    return layout.leaf(node, shape_of(node))


# Ops that put parts together


@handles(aten.cat.default)
def _cat(trace: Trace, node: fx.Node) -> Form:
    dim = argument(node, 1, "dim", 0) % len(shape_of(node))
    pieces = [trace[piece] for piece in arguments(node)[0] if len(shape_of(piece)) == len(shape_of(node))]
    if len(pieces) != len(arguments(node)[0]) or len({p.meta["val"].dtype for p in arguments(node)[0]}) > 1:
        return layout.leaf(node, shape_of(node))
    return pieces[0] if len(pieces) == 1 else layout.join(node, pieces, dim)


@handles(aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_permuted.default)
def _empty(trace: Trace, node: fx.Node) -> Form:
    form = layout.leaf(node, shape_of(node))
    return Form(form.dims, Term(form.term.read, Undefined()))


@handles(aten.copy.default)
def _copy(trace: Trace, node: fx.Node) -> Form:
    target, source = arguments(node)[:2]
    before, after = source.meta["val"].dtype, target.meta["val"].dtype
    if source.meta["val"].device != target.meta["val"].device or (
        before != after and not (before.is_floating_point and after.is_floating_point)
    ):
        return layout.leaf(node, shape_of(node))
    form = layout.expand(trace[source], shape_of(node))
    return form if before == after else layout.cast(form, after)


@handles(aten.slice_scatter.default)
def _slice_scatter(trace: Trace, node: fx.Node) -> Form:
    target, source = trace[arguments(node)[0]], trace[arguments(node)[1]]
    whole = shape_of(node)
    dim = argument(node, 2, "dim", 0) % len(whole)
    size = source.shape[dim]
    start = _start(argument(node, 3, "start"), argument(node, 4, "end"), whole[dim], size)
    if argument(node, 5, "step", 1) != 1:
        return layout.leaf(node, whole)
    after = total([whole[dim], -start, -size])
    pieces = [] if same(start, 0) else [layout.take(target, dim, 0, start)]
    pieces.append(source)
    if not same(after, 0):
        pieces.append(layout.take(target, dim, start + size, after))
    return source if len(pieces) == 1 else layout.join(node, pieces, dim)


# Arithmetic


@handles(aten.mm.default)
def _mm(trace: Trace, node: fx.Node) -> Form:
    return layout.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [], (1, 0))


@handles(aten.bmm.default)
def _bmm(trace: Trace, node: fx.Node) -> Form:
    return layout.contract(node, trace[arguments(node)[0]], trace[arguments(node)[1]], [(0, 0)], (2, 1))


def factor_of(node: fx.Node, name: str = "alpha") -> float | None:
    """The number that an op multiplies an operand by on the side, None if the graph does not say it."""
    factor: Any = node.kwargs.get(name, 1)
    return float(factor) if isinstance(factor, int | float) else None


@handles(aten.addmm.default)
def _addmm(trace: Trace, node: fx.Node) -> Form:
    bias, left, right = (trace[operand] for operand in arguments(node))
    alpha, beta = factor_of(node), factor_of(node, "beta")
    if alpha is None or not beta:  # a bias times 0 is nothing even if it is NaN
        return layout.leaf(node, shape_of(node))
    product = _times(layout.contract(Unread(node), left, right, [], (1, 0)), alpha)
    return layout.add(node, [product, _times(bias, beta)], shape_of(node))


@handles(aten.add.Tensor, aten.sub.Tensor)
def _add(trace: Trace, node: fx.Node) -> Form:
    a, b = arguments(node)[:2]
    factor = factor_of(node)
    known = is_tensor(a) and is_tensor(b) and any(trace[o].term.parts is not None for o in (a, b))
    if not known or factor is None or not node.meta["val"].dtype.is_floating_point:
        return _pointwise(trace, node)
    sign = 1 if node.target is aten.add.Tensor else -1
    return layout.add(node, [trace[a], _times(trace[b], sign * factor)], shape_of(node))


def _times(form: Form, factor: float) -> Form:
    return form if factor == 1 else layout.scaled(form, factor)


@handles(aten.neg.default)
def _negative(trace: Trace, node: fx.Node) -> Form:
    form = trace[arguments(node)[0]]
    known = form.term.parts is not None and node.meta["val"].dtype.is_floating_point
    return layout.scaled(form, -1.0) if known else _pointwise(trace, node)


@handles(aten.constant_pad_nd.default)
def _pad(trace: Trace, node: fx.Node) -> Form:
    form, amounts = trace[arguments(node)[0]], [size_of(amount) for amount in arguments(node)[1]]
    before_after = list(zip(amounts[::2], amounts[1::2], strict=True))[::-1]
    padded = [len(form.dims) - len(before_after) + i for i, pair in enumerate(before_after) if pair != (0, 0)]
    if len(padded) != 1 or argument(node, 2, "value", 0) != 0:
        return layout.leaf(node, shape_of(node))
    before, after = before_after[padded[0] - len(form.dims) + len(before_after)]
    if any(not isinstance(size, int) or size < 0 for size in (before, after)):
        return layout.leaf(node, shape_of(node))
    return layout.pad(node, form, padded[0], before, after)


@handles(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scale(trace: Trace, node: fx.Node) -> Form:
    division = node.target in (aten.div.Tensor, aten.div.Scalar)
    a, b = arguments(node)[:2]
    if not division and isinstance(a, int | float) and is_tensor(b):
        a, b = b, a
    number = isinstance(b, int | float) and not isinstance(b, bool) and not (division and b == 0)
    scalable = is_tensor(a) and (trace[a].term.parts is not None or in_fp8(trace, trace[a]))
    if scalable and number and node.meta["val"].dtype.is_floating_point:
        return layout.scaled(trace[a], 1 / b if division else float(b))
    known = None
    if not division and is_tensor(a) and is_tensor(b):
        known = dequantized(trace, node) or dequantized_read(trace, node)
    return known or _pointwise(trace, node)


def _pointwise(trace: Trace, node: fx.Node) -> Form:
    operands = [argument for argument in OrderedSet(node.all_input_nodes) if is_tensor(argument)]
    if not operands:
        return layout.leaf(node, shape_of(node))
    return layout.pointwise(node, [trace[o] for o in operands], shape_of(node))


from .read_through import flattened  # noqa: E402  handlers of its own, which need what is above
