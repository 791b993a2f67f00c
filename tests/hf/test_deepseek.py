"""Unmodified transformers DeepSeek-V2 and V3: every site rewritten, logits as right as eager's, few compilations."""

import copy

import pytest
import torch

import mla_compile
from tests.errors import assert_as_close_as_eager

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
}

FAMILIES = {
    "v3": lambda **more: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES | more)),
    "v2": lambda **more: transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**SIZES | more)),
}


def build(family, attention="sdpa", q_lora_rank=24, layers=SIZES["num_hidden_layers"]):
    model = FAMILIES[family](q_lora_rank=q_lora_rank, num_hidden_layers=layers).eval()
    model.set_attn_implementation(attention)
    return model


def new_cache(model, kind):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=32)


def logits(model, kind, ids, mask, steps=(6, 1, 1, 1, 3)):
    """The logits of a prefill, three decode steps and a call with three tokens."""
    cache, start, outputs = new_cache(model, kind), 0, []
    for step in steps:
        end = start + step
        attention_mask = None if mask is None else mask[:, :end]
        outputs.append(
            model(ids[:, start:end], attention_mask=attention_mask, past_key_values=cache, use_cache=True).logits
        )
        start = end
    return outputs


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(
    ("family", "attention", "q_lora_rank", "padded", "layers"),
    [
        pytest.param("v3", "sdpa", 24, False, 1, id="v3"),
        pytest.param("v3", "sdpa", 24, True, 1, id="v3 left padded", marks=pytest.mark.slow),
        pytest.param("v3", "sdpa", 24, False, 2, id="v3 of two layers", marks=pytest.mark.slow),
        pytest.param("v3", "eager", 24, False, 2, id="v3 eager attention", marks=pytest.mark.slow),
        pytest.param("v2", "sdpa", None, False, 1, id="v2 without q-LoRA", marks=pytest.mark.slow),
        pytest.param("v2", "sdpa", 24, True, 2, id="v2 left padded", marks=pytest.mark.slow),
    ],
)
def test_every_site_is_rewritten_and_logits_are_as_right_as_eagers(
    family, attention, q_lora_rank, padded, layers, kind
):
    model = build(family, attention, q_lora_rank, layers)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 12))
    mask = None
    if padded:
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[0, :3] = 0
    exact = logits(copy.deepcopy(model).double(), kind, ids, mask)
    eager = logits(model, kind, ids, mask)
    model.compile(backend="mla")
    compiled = logits(model, kind, ids, mask)
    real = slice(None) if mask is None else slice(3, None)  # what padding tokens predict means nothing
    for i, (c, e, x) in enumerate(zip(compiled, eager, exact, strict=True)):
        here = real if i == 0 else slice(None)
        assert_as_close_as_eager(c[:, here], e[:, here], x[:, here])
    assert mla_compile.reports()
    for report in mla_compile.reports():
        assert len(report.sites) == report.rewritten == layers


def test_the_report_names_the_line_of_the_model():
    model = build("v3")
    report = mla_compile.explain(model, torch.randint(0, 64, (1, 5)))
    assert len(report.sites) == 2
    for site in report.sites:
        assert "modeling_deepseek_v3.py:" in site.location
        assert site.shapes["L"] == "16"
