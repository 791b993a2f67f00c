"""Products in half precision by way of float32: right to one rounding, and only where no library has them."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile.cpu_products import has_products
from mla_compile.inductor import codegen, widened_products
from mla_compile.inductor.retrace import retrace
from mla_compile.inductor.widened_products import widened_addmm, widened_bmm, widened_grouped_mm, widened_mm
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, N, V

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def no_library(monkeypatch):
    """This CPU's libraries have no products in half precision."""
    monkeypatch.setattr(widened_products, "has_products", lambda dtype: dtype.itemsize > 2)


def assert_rounded_once(actual, exact, dtype):
    """Half an eps of each number, and what float32 sums are off by, which is far less."""
    assert (actual.dtype, actual.shape) == (dtype, exact.shape)
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5
    assert ((actual.double() - exact).abs() <= allowed).all()


@HALF
@pytest.mark.parametrize("rows", [2, 70])
def test_a_product(no_library, dtype, rows):
    x, weight = torch.randn(rows, 64, dtype=dtype), torch.randn(40, 64, dtype=dtype)
    assert_rounded_once(widened_mm(x, weight.t()), x.double() @ weight.double().t(), dtype)


@HALF
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2.0, 0.5), (0, 1)])
def test_a_product_with_a_bias(no_library, dtype, beta, alpha):
    x, weight = torch.randn(5, 64, dtype=dtype), torch.randn(40, 64, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if beta else torch.full((40,), torch.nan, dtype=dtype)
    product = alpha * (x.double() @ weight.double().t())
    exact = beta * bias.double() + product if beta else product
    assert_rounded_once(widened_addmm(bias, x, weight.t(), beta=beta, alpha=alpha), exact, dtype)


@HALF
def test_products_of_a_batch(no_library, dtype):
    x, y = torch.randn(3, 5, 64, dtype=dtype), torch.randn(3, 40, 64, dtype=dtype).mT
    assert_rounded_once(widened_bmm(x, y), x.double() @ y.double(), dtype)


@HALF
def test_products_of_a_batch_with_given_matrices(no_library, dtype):
    """The matrices are widened as they are multiplied, as in products by groups."""
    x, y = torch.randn(5, 3, 64, dtype=dtype).transpose(0, 1), torch.randn(3, 40, 64, dtype=dtype).mT
    out = widened_bmm(x, y, are_given=lambda matrices: matrices is y)
    assert_rounded_once(out, x.double() @ y.double(), dtype)


@HALF
def test_no_given_matrix_is_written_a_second_time(no_library, dtype):
    """For a batch of weights in a graph, no copy in float32 is made."""

    def products(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(x, weights.mT), torch.bmm(x, weights.mT * 2)

    x, weights = torch.empty(3, 5, 64, dtype=dtype), torch.empty(3, 40, 64, dtype=dtype)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, weights)]
        graph = retrace(make_fx(products)(*fakes)).graph
    assert len(graph.find_nodes(op="call_function", target=WIDENED)) == 1
    (bmm,) = graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    assert bmm.meta["val"].dtype == torch.float32


@HALF
def test_a_product_by_groups(no_library, dtype):
    x, weights = torch.randn(6, 64, dtype=dtype), torch.randn(3, 40, 64, dtype=dtype)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    exact = torch.einsum("sk,smk->sm", x.double(), weights[[0, 0, 2, 2, 2, 2]].double())
    assert_rounded_once(widened_grouped_mm(x, weights.mT, ends), exact, dtype)


@pytest.mark.parametrize("tensors", ["float32", "on another device", "of two dtypes"])
def test_leaves_other_products_to_the_library(no_library, tensors):
    dtype, device = (torch.float32 if tensors == "float32" else torch.bfloat16), "cpu"
    device = "meta" if tensors == "on another device" else device
    x, weights = torch.ones(4, 8, dtype=dtype, device=device), torch.ones(3, 5, 8, dtype=dtype, device=device)
    if tensors == "of two dtypes":
        x = x.half()
    ends = torch.tensor([1, 2, 4], device=device)
    assert widened_mm(x, weights[0].t()) is NotImplemented
    assert widened_addmm(torch.ones(5, dtype=dtype, device=device), x, weights[0].t()) is NotImplemented
    assert widened_grouped_mm(x, weights.mT, ends) is NotImplemented


def test_leaves_other_groups_to_the_library(no_library):
    x, weights = torch.ones(4, 8).bfloat16(), torch.ones(3, 5, 8).bfloat16()
    assert widened_grouped_mm(x.expand(3, 4, 8), weights.mT) is NotImplemented
    assert widened_grouped_mm(x, weights.mT, torch.tensor([1, 2, 4]), out_dtype=torch.float32) is NotImplemented


def test_leaves_products_of_one_row_or_column_to_inductor(no_library):
    x, y = torch.ones(3, 4, 8).bfloat16(), torch.ones(3, 8, 5).bfloat16()
    assert widened_bmm(x[:, :1], y) is NotImplemented
    assert widened_bmm(x, y[..., :1]) is NotImplemented


@HALF
def test_a_library_with_products_keeps_them(monkeypatch, dtype):
    monkeypatch.setattr(widened_products, "has_products", lambda _: True)
    x, weight = torch.ones(4, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype)
    assert widened_mm(x, weight.t()) is NotImplemented
    assert widened_bmm(x[None], weight.t()[None]) is NotImplemented


def test_wide_dtypes_have_products():
    assert has_products(torch.float32)
    assert has_products(torch.float64)


@HALF
def test_products_are_a_librarys_where_torch_says_so(monkeypatch, dtype):
    """oneDNN takes a linear layer in half precision, or says that this CPU cannot."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    arguments = torch.ones(4, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype), None, "none", [], ""
    if has_products(dtype):
        torch.ops.mkldnn._linear_pointwise(*arguments)
    else:
        with pytest.raises(RuntimeError, match="could not create a primitive"):
            torch.ops.mkldnn._linear_pointwise(*arguments)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_avx_512_needs_instructions_for_bfloat16(monkeypatch, has_instructions):
    """Without them oneDNN takes bfloat16 too, but several times as long as float32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    assert has_products(torch.bfloat16) == has_instructions


MM, ADDMM, WIDENED = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.mla.widened_matmul.default)
STEPS = (6, 1, 1, 3)
"""Query tokens of each call."""


def run(module: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    cache, outputs = module.empty_cache(2, xs[0].dtype), []
    for x in xs:
        output, cache = module(x, cache)
        outputs.append(output)
    return outputs


def compiled_products(module: nn.Module, xs: list[Tensor]) -> tuple[list[Tensor], list[set[Any]]]:
    """Outputs of the compiled module, and which products each of its graphs has."""
    seen: list[set[Any]] = []
    compile_fx_inner = codegen.compile_fx_inner

    def watched(graph: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        seen.append({node.target for node in graph.graph.nodes} & {MM, ADDMM, WIDENED})
        return compile_fx_inner(graph, *arguments, **named)

    with mock.patch.object(codegen, "compile_fx_inner", watched), torch.no_grad():
        outputs = run(torch.compile(module, backend="mla", fullgraph=True), xs)
    assert all(site.rewritten for report in mla_compile.reports()[-len(seen) :] for site in report.sites)
    return outputs, seen


@pytest.mark.parametrize("codegen", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.diagonal
@HALF
def test_a_compiled_module(no_library, request, dtype, codegen):
    """With one token for each of two sequences, and with several, no product is in half precision."""
    if not codegen:
        request.getfixturevalue("without_codegen")
    module = Combined()
    module.o_proj = nn.Linear(N * V, HIDDEN)
    xs = [torch.randn(2, tokens, HIDDEN, dtype=torch.float64) for tokens in STEPS]
    with torch.no_grad():
        exact, module = run(copy.deepcopy(module).double(), xs), module.to(dtype)
        xs = [x.to(dtype) for x in xs]
        eager = run(module, xs)
    outputs, products = compiled_products(module, xs)
    assert len(products) >= 3
    assert all(some == {WIDENED} for some in products)
    for results in zip(outputs, eager, exact, strict=True):
        assert_as_close_as_eager(*results)


def test_a_compiled_module_whose_products_are_a_librarys(monkeypatch):
    monkeypatch.setattr(widened_products, "has_products", lambda _: True)
    _, products = compiled_products(Combined().bfloat16(), [torch.randn(2, 6, HIDDEN).bfloat16()])
    assert products == [{MM}]
