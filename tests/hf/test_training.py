"""transformers' DeepSeek models are trained as they are: loss and the gradients of every weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import mla_compile
from tests.training import assert_gradients_close

pytest.importorskip("transformers")

import transformers

LAYERS = 2
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
pytestmark = pytest.mark.usefixtures("without_codegen")


def model_of(family: str, layers: int = 1, **more: object):
    rank = 16 if family == "deepseek_v3" else None
    settings = SIZES | {"num_hidden_layers": layers} | {"first_k_dense_replace": LAYERS, "q_lora_rank": rank} | more
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings)).train()


def tokens(padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(50, (2, 15))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    there = torch.ones_like(ids)
    there[0, :5] = 0
    return {"input_ids": ids, "attention_mask": there, "labels": ids.masked_fill(there == 0, -100)}


def gradients(run, model, batch, autocast=False) -> list[Tensor]:
    """Loss, and the gradients of all weights; zeros for weights without."""
    model.zero_grad()
    with torch.enable_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = run(**batch, use_cache=False).loss
        loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


def assert_trained(model, batch, autocast=False, dynamic=None):
    eager = gradients(model, model, batch, autocast)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide, batch)
    found = gradients(torch.compile(model, backend="mla", dynamic=dynamic), model, batch, autocast)
    assert sum(report.rewritten for report in mla_compile.reports()) == model.config.num_hidden_layers
    assert_gradients_close(found, eager, exact)


def test_sizes_and_numbers_may_be_symbols():
    """The scale and what a norm adds to the variance are floats that `dynamic=True` makes inputs."""
    assert_trained(model_of("deepseek_v3", attn_implementation="eager"), tokens(), dynamic=True)


SOON = [pytest.param("deepseek_v2", marks=pytest.mark.slow), "deepseek_v3"]


@pytest.mark.diagonal
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_all_layers_are_trained(family, attention):
    assert_trained(model_of(family, LAYERS, attn_implementation=attention), tokens())


@pytest.mark.parametrize("family", SOON)
def test_in_bfloat16(family):
    assert_trained(model_of(family).bfloat16(), tokens())


@pytest.mark.parametrize("family", SOON)
def test_under_autocast(family):
    assert_trained(model_of(family), tokens(), autocast=True)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_padded_batch(attention):
    assert_trained(model_of("deepseek_v3", attn_implementation=attention), tokens(padded=True))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointed_layers():
    model = model_of("deepseek_v3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trained(model, tokens())


def test_frozen_weights_stay_without_gradients():
    model = model_of("deepseek_v3").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_b_proj.weight.requires_grad_(True)
    assert_trained(model, tokens())


@pytest.mark.slow
def test_attention_dropout_stays_as_it_is():
    model = model_of("deepseek_v3", LAYERS, attention_dropout=0.1)
    gradients(torch.compile(model, backend="mla"), model, tokens())
    reasons = [site.reason for report in mla_compile.reports() for site in report.sites]
    assert len(reasons) == LAYERS
    assert all(reason.startswith("expected attention without dropout") for reason in reasons)


@pytest.mark.slow
def test_gradients_of_two_batches_add_up():
    """Gradient accumulation: one model, several calls before a step."""
    model, batches = model_of("deepseek_v3"), [tokens(), tokens()]
    compiled = torch.compile(model, backend="mla")
    sums = []
    for run in (model, compiled):
        model.zero_grad()
        with torch.enable_grad():
            for batch in batches:
                run(**batch, use_cache=False).loss.backward()
        sums.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, plain in zip(*sums, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert len(mla_compile.reports()) == 1
