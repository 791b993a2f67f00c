"""Checks that the forms of a graph's tensors say what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from mla_compile.passes.algebra.terms import Form, Unread
from mla_compile.passes.nodes.arguments import is_tensor
from mla_compile.passes.nodes.shapes import hint_of
from mla_compile.passes.trace.trace import Trace
from tests.passes.graphs import shapes_of, values
from tests.passes.meaning import World


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: every sum and product of them is exact, in half precision too."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


aten = torch.ops.aten
PRODUCTS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    aten.addmm.default: torch.matmul,
    aten.addmv.default: torch.mv,
    aten.addr.default: torch.outer,
    aten.baddbmm.default: torch.bmm,
    aten.addbmm.default: lambda left, right: torch.bmm(left, right).sum(0),
}
"""The product that each op computes before it adds."""


def check_all(module: fx.GraphModule, *tensors: Tensor) -> Form:
    """Check the form of every tensor of a graph. Returns the form of the output."""
    trace = Trace(module.graph)
    results = values(module, *tensors)
    world = World({node: _array(value) for node, value in results.items() if is_tensor(node)})
    for node in results:
        if node.target in PRODUCTS:
            _, left, right = (results[operand] for operand in node.args)
            world.tensors[Unread(node)] = _array(PRODUCTS[node.target](left, right))
    output = next(iter(reversed(module.graph.nodes))).args[0]
    symbols = {s for node in results if is_tensor(node) for size in trace[node].shape if (s := size) != 0}
    free = {symbol for size in symbols if not isinstance(size, int) for symbol in size.free_symbols}
    world.symbols = {symbol: hint_of(symbol, shapes_of(module)) for symbol in free}
    for node in results:
        if is_tensor(node):
            try:
                world.check(trace[node], world.tensors[node])
            except AssertionError as error:
                raise AssertionError(f"{node.format_node()}: {error}") from error
    return trace[output]


def _array(value: Tensor) -> np.ndarray:
    return value.numpy() if value.is_complex() else value.to(torch.float64).numpy()


def seen_through(form: Form) -> bool:
    """Whether a form says more than that there is a tensor of this shape."""
    source = form.term.read.source
    return form.term.parts is not None or source.op == "placeholder"
