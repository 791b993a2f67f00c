"""Nodes that compute the same thing have one first node; those that may differ have not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_compile.passes.nodes.common_subexpressions import CommonSubexpressions
from tests.passes.graphs import capture


def firsts(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[object, object]:
    """The first nodes of the two results of a function."""
    graph, same = capture(function, torch.ones(3)).graph, CommonSubexpressions()
    first = {node: same.first(node) for node in graph.nodes}
    (results,) = graph.output_node().args
    one, other = (first[node] for node in results)
    return one, other


@pytest.mark.parametrize(
    "function", [lambda x: (x.sin(), x.sin()), lambda x: (x + 1, x + 1), lambda x: (x * 0.0, x * 0.0)]
)
def test_the_same(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    one, other = firsts(function)
    assert one is other


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sin(), x.cos()),
        lambda x: (x + 1, x + 1.0),
        lambda x: (torch.copysign(x, 0.0), torch.copysign(x, -0.0)),
        lambda x: (torch.rand_like(x), torch.rand_like(x)),
    ],
)
def test_not_the_same(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    one, other = firsts(function)
    assert one is not other
