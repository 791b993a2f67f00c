"""Handlers of collectives: a gathered tensor has an axis of ranks, along which it holds the tensor of each rank."""

from __future__ import annotations

import torch
from torch import fx

from ..algebra import operations
from ..algebra.terms import Form
from ..nodes.arguments import arguments
from ..nodes.shapes import shape_of
from .handler import Forms, Handlers

HANDLERS = Handlers()
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


@HANDLERS.of(WAIT)
def _wait(trace: Forms, node: fx.Node) -> Form:
    """The result of a collective exists once it was waited for: the source is the wait, not the collective.

    A gather of `[B, ...]` from k ranks is `[k B, ...]`: its first dimension is the axis of ranks and those of B.
    Nothing more is known of it.
    """
    (collective,) = arguments(node)
    if collective.target is not ALL_GATHER:
        return operations.leaf(node, shape_of(node))
    operand, ranks, _ = arguments(collective)
    form = operations.leaf(node, (ranks, *shape_of(operand)))
    dims = ((*form.dims[0], *form.dims[1]), *form.dims[2:])
    return Form(dims, operations.read_of(node, dims))


def gather_behind(node: object) -> fx.Node | None:
    """The gather whose result a node holds; None if it holds none."""
    if not isinstance(node, fx.Node) or node.target is not WAIT:
        return None
    (collective,) = arguments(node)
    return collective if collective.target is ALL_GATHER else None
