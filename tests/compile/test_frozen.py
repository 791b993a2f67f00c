"""Inductor's `freezing`: parameters become constants of the generated code, after the passes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import mla_compile
from mla_compile.inductor.retrace import retrace
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, R


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        yield


def inputs(batch: int, queries: int, tokens: int, dtype: torch.dtype = torch.float32):
    cache = tuple(torch.randn(batch, tokens, width, dtype=dtype) for width in (L, R))
    return torch.randn(batch, queries, HIDDEN, dtype=dtype), cache


def check(module: nn.Module, arguments, got) -> None:
    double = torch.utils._pytree.tree_map(torch.Tensor.double, arguments)
    outputs = (got, module(*arguments), copy.deepcopy(module).double()(*double))
    for each in zip(*map(torch.utils._pytree.tree_leaves, outputs), strict=True):
        assert_as_close_as_eager(*each)


@pytest.mark.parametrize(
    ("dtype", "sizes", "path"),
    [
        (torch.bfloat16, (2, 1, 40), "absorbed"),  # weights are packed if the CPU has bfloat16 products
        (torch.float32, (1, 1, 40), "absorbed"),
        pytest.param(torch.bfloat16, (1, 40, 0), "chunked", marks=pytest.mark.slow),
    ],
)
def test_parameters_are_constants_of_a_rewritten_graph(dtype, sizes, path):
    module = Combined().to(dtype)
    arguments = inputs(*sizes, dtype)
    got, (code,) = run_and_get_code(torch.compile(module, backend="mla"), *arguments)
    (site,) = mla_compile.last_report().sites
    assert site.path == path
    check(module, arguments, got)
    assert len(set(re.findall(r"_frozen_param\d+", code))) >= len(list(module.parameters()))
    assert re.search(r"torch\.ops\.mla\.", code)


def test_other_parameters_are_other_code():
    """torch's caches must tell the same graph with other constants apart."""
    arguments = inputs(2, 1, 40)
    for _ in range(2):
        torch._dynamo.reset()
        module = Combined()
        check(module, arguments, torch.compile(module, backend="mla")(*arguments))
        assert mla_compile.last_report().rewritten == 1


def test_a_rewritten_graph_is_verified_with_parameters_that_a_call_has_not():
    module, arguments = Combined(), inputs(2, 1, 40)
    expected = module(*arguments)
    with torch._inductor.config.patch(freezing_discard_parameters=True):
        compiled = torch.compile(module, backend="mla", options={"mla.verify": True})
        for _ in range(2):
            torch.testing.assert_close(compiled(*arguments), expected)
        assert mla_compile.last_report().rewritten == 1
    with pytest.raises(RuntimeError, match="after Dynamo Freezing"):
        module(*arguments)


def test_explain_leaves_parameters_where_they_are():
    module, arguments = Combined(), inputs(2, 1, 40)
    report = mla_compile.explain(module, *arguments)
    assert report.rewritten == 1
    module(*arguments)


def test_kernels_are_made_for_the_dtypes_of_parameters(monkeypatch):
    """The only input of a model may be token ids, which are integers."""
    seen = []
    monkeypatch.setattr(mla_compile.attempt.cpp_kernels, "begin", lambda dtypes: seen.extend(dtypes))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Embedding(10, HIDDEN), Combined()

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.attention(x, (x.new_zeros(*x.shape[:1], 0, L), x.new_zeros(*x.shape[:1], 0, R)))

    torch.compile(Model(), backend="mla")(torch.zeros(1, 40, dtype=torch.int64))
    assert mla_compile.last_report().rewritten == 1
    assert torch.float32 in seen


def test_inductors_own_decomposition_of_a_product_is_kept():
    """Ours takes products of one row. Others go to Inductor's, which takes small products whose sum has one term."""
    graph = torch.fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (left, right)),))
    with torch._subclasses.FakeTensorMode() as mode:
        for node, size in zip((left, right), ((3, 1), (1, 4)), strict=True):
            node.meta["val"] = mode.from_tensor(torch.empty(size))
        targets = {node.target for node in retrace(torch.fx.GraphModule({}, graph)).graph.nodes}
    assert torch.ops.aten.mm.default not in targets
    assert torch.ops.aten.mul.Tensor in targets
