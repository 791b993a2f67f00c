"""Handlers of ops that do the same to every slice of a tensor: if its slices repeat, so do those of the result."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..algebra import elementwise, operations
from ..algebra.sizes import same
from ..algebra.terms import Axis, Dim, Form
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of
from .handler import Forms, Handlers

HANDLERS = Handlers()


@HANDLERS.of(aten.flip.default, aten.roll.default)
def _moved(trace: Forms, node: fx.Node) -> Form:
    """Ops that move elements along some dimensions; along all, if `roll` is given none."""
    rank = len(shape_of(node))
    along = argument(node, "dims") or range(rank)
    return _along(trace, node, {dim % rank for dim in along})


@HANDLERS.of(
    aten.view_as_complex.default,
    aten.view_as_complex_copy.default,
    aten.view_as_real.default,
    aten.view_as_real_copy.default,
)
def _pairs(trace: Forms, node: fx.Node) -> Form:
    """Ops that turn a last dimension of two numbers into complex numbers, or back."""
    return _along(trace, node, {max(len(shape_of(node)), len(trace[arguments(node)[0]].dims)) - 1})


def _along(trace: Forms, node: fx.Node, along: Collection[int]) -> Form:
    """The form of a function of the dimensions `along` of its operand, computed separately at every index of the
    others."""
    source, shape = trace[arguments(node)[0]], shape_of(node)
    dims: list[Dim] = [
        source.dims[i] if i not in along else () if same(size, 1) else (Axis(size),) for i, size in enumerate(shape)
    ]
    depends = source.term.axes.union(*(dims[i] for i in along if i < len(dims)))
    return elementwise.pointwise(node, [Form(tuple(dims), operations.read_of(node, dims, depends))], shape)
