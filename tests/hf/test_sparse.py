"""Unmodified DeepSeek-V3.2 and GLM-5: their indexers' masks become indices, and logits stay as right as eager's."""

import copy
from unittest import mock

import pytest
import torch

import mla_compile
from mla_compile import compilation
from mla_compile.cost import Device
from mla_compile.kernels.index_scores import native
from tests.errors import assert_as_close_as_eager

pytest.importorskip("transformers")

import transformers

from .families import EXPANDED, FAMILIES, INDEXED
from .test_deepseek import SIZES, logits

pytestmark = pytest.mark.skipif(not INDEXED, reason=EXPANDED)

TOPK = 4
TOKENS = 24
SPARSE = SIZES | {"q_lora_rank": 24, "index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 2}


def build(family, attention):
    if family == "deepseek_v32":
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**SPARSE))
    else:  # its second layer takes the indices of the first
        config = transformers.GlmMoeDsaConfig(**SPARSE, head_dim=8, indexer_types=["full", "shared"])
        model = transformers.GlmMoeDsaForCausalLM(config)
    model.eval().set_attn_implementation(attention)
    return model


SLOW = pytest.mark.slow


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("family", "attention", "kind", "padded"),
    [
        pytest.param("deepseek_v32", "eager", "static", False, marks=SLOW),
        ("glm_moe_dsa", "sdpa", "static", True),
        pytest.param("deepseek_v32", "sdpa", "dynamic", False, marks=SLOW),
        pytest.param("glm_moe_dsa", "eager", "dynamic", False, marks=SLOW),
        pytest.param("deepseek_v32", "sdpa", "static", False, marks=SLOW),
        pytest.param("deepseek_v32", "eager", "dynamic", True, marks=SLOW),
        pytest.param("deepseek_v32", "eager", "static", True, marks=SLOW),
        pytest.param("deepseek_v32", "sdpa", "dynamic", True, marks=SLOW),
        pytest.param("glm_moe_dsa", "sdpa", "dynamic", True, marks=SLOW),
        pytest.param("glm_moe_dsa", "eager", "static", False, marks=SLOW),
    ],
)
def test_every_site_is_sparse_and_logits_are_as_right_as_eagers(monkeypatch, family, attention, kind, padded):
    # With so few tokens weights are most of what is moved. Where only FLOPs count the named keys are cheaper, also in
    # the prompt, of whose pairs a causal limit leaves half to the dense paths.
    monkeypatch.setattr(compilation.devices, "measured", lambda *_: Device("slow", 1e6, 1e15))
    model = build(family, attention)
    ids = torch.randint(0, SIZES["vocab_size"], (2, TOKENS + 4))
    mask = None
    if padded:
        mask = torch.ones(2, TOKENS + 4, dtype=torch.int64)
        mask[0, :3] = 0
    steps = (TOKENS, 1) if padded else (TOKENS, 1, 3)
    exact_model = copy.deepcopy(model).double()
    exact_model.set_attn_implementation("sdpa")  # the eager one adds two masks, which overflows in float64
    exact = logits(exact_model, kind, ids, mask, steps)
    eager = logits(model, kind, ids, mask, steps)
    model.compile(backend="mla")
    compiled = logits(model, kind, ids, mask, steps)
    for i, (c, e, x) in enumerate(zip(compiled, eager, exact, strict=True)):
        here = slice(3, None) if padded and i == 0 else slice(None)  # what padding tokens predict means nothing
        assert_as_close_as_eager(c[:, here], e[:, here], x[:, here])
    reports = mla_compile.reports()
    assert reports
    for report in reports:
        assert [site.path for site in report.sites] == ["sparse", "sparse"]
        assert all("top-k" in site.mask for site in report.sites)


@pytest.mark.usefixtures("without_codegen")
def test_where_every_key_is_named_the_path_is_dense():
    model = build("deepseek_v32", "sdpa")
    ids = torch.randint(0, SIZES["vocab_size"], (2, TOPK))
    expected = model(ids).logits
    model.compile(backend="mla")
    torch.testing.assert_close(model(ids).logits, expected)
    assert all(site.path in ("absorbed", "chunked") for site in mla_compile.last_report().sites)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("family", "verify", "layers"),
    [("deepseek_v32", False, 2), ("deepseek_v32", True, 0), ("deepseek_v4", False, 1)],
)
@torch.no_grad()
def test_an_indexers_scores_are_one_op(monkeypatch, family, verify, layers):
    """But where a check compares them with those of single heads, as written."""
    model = FAMILIES[family].build().eval()
    ids = torch.randint(3, SIZES["vocab_size"], (2, TOKENS))
    compiled = torch.compile(model, backend="mla", options={"mla.verify": verify})
    compiled(ids)
    kernels = mock.Mock(wraps=native.KERNELS)
    monkeypatch.setattr(native, "KERNELS", kernels)
    found = compiled(ids)
    assert kernels.of.call_count == layers
    torch.testing.assert_close(found.logits, model(ids).logits)
