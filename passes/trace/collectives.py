"""Handlers of collectives: a gathered tensor is one tensor for each rank, along an axis of ranks."""

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


@HANDLERS.of(ALL_GATHER)
def _all_gather(trace: Forms, node: fx.Node) -> Form:
    """`[k B, ...]` of each rank's `[B, ...]`: nothing is known of it but that its first dimension is ranks and B."""
    operand, ranks, _ = arguments(node)
    form = operations.leaf(node, (ranks, *shape_of(operand)))
    dims = ((*form.dims[0], *form.dims[1]), *form.dims[2:])
    return Form(dims, operations.read_of(node, dims))


@HANDLERS.of(WAIT)
def _wait(trace: Forms, node: fx.Node) -> Form:
    return trace[arguments(node)[0]]
