"""Experts of a decode step on CPU: each row reads its own expert's weights in a sum, with no product by groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

from mla_compile.inductor import codegen, widened_products
from tests.errors import assert_as_close_as_eager
from tests.hf.families import EXPERTS, FAMILIES, PLAIN, build, decoded, exact, interpreted, some_ids

ONE_LAYER = PLAIN | EXPERTS | {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@pytest.mark.parametrize(
    ("dtype", "product", "library"),
    [
        pytest.param(torch.float32, "grouped_mm_fallback", True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "_grouped_mm", True, marks=pytest.mark.slow),
        (torch.bfloat16, "widened_matmul", False),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_step_has_no_product_by_groups(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, product: str, library: bool
) -> None:
    """`library` says whether the CPU's library has products in this dtype. If not, the prompt's are widened."""
    monkeypatch.setattr(widened_products, "has_products", lambda dtype: library or dtype.itemsize > 2)
    config, ids = transformers.DeepseekV3Config(**ONE_LAYER), some_ids()
    family = replace(FAMILIES["deepseek_v3"], build=lambda: transformers.DeepseekV3ForCausalLM(config), sites=1)
    model = build(family, "sdpa").to(dtype)
    expected = decoded(exact(model), "dynamic", ids)
    eager = decoded(model, "dynamic", ids)
    seen: list[set[str]] = []

    def interpret(module: torch.fx.GraphModule, inputs: object, **kwargs: object) -> Any:
        seen.append({str(node.target) for node in module.graph.nodes if len(node.args) > 2})  # with groups
        return make_boxed_func(module.forward)

    with interpreted(family), mock.patch.object(codegen, "compile_fx_inner", interpret):
        torch.compiler.reset()
        model.compile(backend="mla")
        prompt = model(ids[:, :12])  # 24 tokens with two experts each: more rows than `FEW_ROWS`
        actual = decoded(model, "dynamic", ids)
    assert not counters["graph_break"]
    assert prompt.logits.shape[1] == 12
    groups = [any(name.split(".")[-2] == product for name in names if "." in name) for names in seen]
    assert groups == [True, False]
    assert_as_close_as_eager(actual, eager, expected)
