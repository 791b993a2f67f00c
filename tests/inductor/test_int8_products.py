"""Products with int8 weights stay in the form that Inductor looks for: `woq_matcher_count` is stock Inductor's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.inductor.int8_products import products_with_int8
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined

K, M = HIDDEN, 128


def cast_and_transposed(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scales


def transposed_and_cast(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """As torchao's `Int8WeightOnlyConfig` has it."""
    rows = x.reshape(-1, x.shape[-1])
    return (torch.mm(rows, weight.t().to(x.dtype)) * scales).reshape(*x.shape[:-1], weight.shape[0])


SPELLINGS = pytest.mark.parametrize("product", [cast_and_transposed, transposed_and_cast])


def found(product: Any, x: torch.dtype, weight: torch.dtype, scales: torch.dtype) -> list[fx.Node]:
    with FakeTensorMode():
        operands = torch.empty(1, 3, K, dtype=x), torch.empty(M, K, dtype=weight), torch.empty(M, dtype=scales)
        return list(products_with_int8(make_fx(product)(*operands).graph))


@SPELLINGS
def test_finds_a_product_that_is_scaled(product):
    assert len(found(product, torch.bfloat16, torch.int8, torch.bfloat16)) == 1


@SPELLINGS
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16, torch.int8, torch.float16),
        (torch.bfloat16, torch.int8, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_leaves_out_other_dtypes(product, dtypes):
    assert not found(product, *dtypes)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]),
        lambda x, w, s: s * F.linear(x, w.to(x.dtype)),
        lambda x, w, s: F.linear(x[0], w.to(x.dtype)) * s,
        lambda x, w, s: (wide := w.to(x.dtype), F.linear(x, wide) * s),
        lambda x, w, s: (y := F.linear(x, w.to(x.dtype)), y * s),
    ],
    ids=["scaled weight", "scales first", "rows", "weight has another reader", "product has another reader"],
)
def test_leaves_out_what_inductor_does_not_find(product):
    assert not found(product, torch.bfloat16, torch.int8, torch.bfloat16)


class Quantised(nn.Module):
    """Attention, and a product with a weight in int8."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.attention, self.product = Combined(), product
        self.register_buffer("weight", torch.randint(-127, 128, (M, K), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(M) / 127)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return self.product(x + self.attention(x, cache)[0], self.weight, self.scales)


ONE = (transposed_and_cast, True, 3)
"""The other cases are slow."""
CASES = [
    pytest.param(*case, marks=() if case == ONE else pytest.mark.slow)
    for case in itertools.product((cast_and_transposed, transposed_and_cast), (False, True), (1, 3))
]


@pytest.mark.parametrize(("product", "freezing", "tokens"), CASES)
def test_inductor_finds_them(product, freezing, tokens):
    module = Quantised(product).bfloat16()
    cache = tuple(torch.randn(1, 9, t.shape[-1]).bfloat16() for t in Combined.empty_cache(1))
    x, counts, outputs = torch.randn(1, tokens, HIDDEN).bfloat16(), [], []
    with torch.no_grad(), config.patch(freezing=freezing, fx_graph_cache=False):
        for backend in ("inductor", "mla"):
            counters.clear()
            outputs.append(torch.compile(module, backend=backend, dynamic=False)(x, cache))
            counts.append(counters["inductor"]["woq_matcher_count"])
            torch._dynamo.reset()
        exact = copy.deepcopy(module).double()(x.double(), tuple(t.double() for t in cache))
    assert counts == [1, 1]
    assert_as_close_as_eager(outputs[1], outputs[0], exact)
