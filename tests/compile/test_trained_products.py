"""Products of a training step: those of the projections stay as they are, forward and backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch._inductor import config

import mla_compile
from tests.compile.layers import Layer, hidden, stock
from tests.models import HIDDEN, Combined, N, P, R, V

pytestmark = pytest.mark.usefixtures("without_codegen")
PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mm.default)


class Einsum(nn.Module):
    """A projection of weights `[N, O, HIDDEN]` written as an einsum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, width // N, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x):
        return torch.einsum("bsh,noh->bsno", x, self.weight).flatten(2)


class InAndOut(nn.Module):
    """A projection of weights `[HIDDEN, O]`, of flattened tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, width) * HIDDEN**-0.5)

    def forward(self, x):
        return (x.flatten(0, 1) @ self.weight).unflatten(0, x.shape[:2])


def layer(projection: str) -> Layer:
    module = Layer()
    if projection == "latent":
        module.mla = Combined(True)
    elif projection != "linear":
        module.mla.q_proj = {"einsum": Einsum, "[in, out]": InAndOut}[projection](N * (P + R))
    return module


def _size(size) -> object:
    return size if isinstance(size, int) else str(size)


def products(module: nn.Module, backend, dynamic: bool = False) -> Counter[tuple[object, ...]]:
    """How many products of a step's forward and backward have which shape of their result."""
    found: Counter[tuple[object, ...]] = Counter()

    def count(graph: torch.fx.Graph) -> None:
        nodes = [node for target in PRODUCTS for node in graph.find_nodes(op="call_function", target=target)]
        found.update(tuple(map(_size, node.meta["val"].shape)) for node in nodes)

    torch._dynamo.reset()
    with config.patch(joint_custom_post_pass=count), torch.enable_grad():
        torch.compile(module, backend=backend, dynamic=dynamic)(hidden().requires_grad_()).sum().backward()
    return found


@pytest.mark.parametrize("projection", ["linear", "latent", "einsum", "[in, out]"])
def test_a_rewrite_adds_no_products(projection):
    """Queries are a projection whose result, in Dynamo's graph, is a view of the product: the rewritten attention reads
    that, and has neither a product nor the gradients of one beside it."""
    module = layer(projection)
    before, after = products(module, stock), products(module, "mla")
    assert mla_compile.last_report().rewritten == 1
    assert not after - before
    up_projected = (hidden().shape[0] * hidden().shape[1], N * (P + V))
    assert before[up_projected] > after[up_projected]


@pytest.mark.slow
def test_nor_does_one_of_symbolic_sizes():
    before, after = (products(Layer(), backend, dynamic=True) for backend in (stock, "mla"))
    assert mla_compile.last_report().rewritten == 1
    assert not after - before
    assert after.total() < before.total()
