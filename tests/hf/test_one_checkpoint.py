"""Prefill, decode steps and the forward of training give the same logits, each as near to float64 as eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

transformers = pytest.importorskip("transformers")

CHECKPOINT = "examples/tiny-deepseek-v3"
TOKENS, PREFILLED = 14, 11
pytestmark = [pytest.mark.usefixtures("without_codegen"), pytest.mark.slow]


def prefill(model, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def decode(model, ids: Tensor) -> Tensor:
    """The last tokens one by one, after a prefill of the others."""
    cache = transformers.DynamicCache(config=model.config)
    logits = [model(ids[:, :PREFILLED], past_key_values=cache).logits]
    logits += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(PREFILLED, ids.shape[1])]
    return torch.cat(logits, dim=1)


def training(model, ids: Tensor) -> Tensor:
    with torch.enable_grad():
        return model(ids, use_cache=False).logits.detach()


# Eager experts branch on data, so each layer is compiled apart: five of them for prompts and again for decode steps.
@torch._dynamo.config.patch(recompile_limit=64)
def test_prefill_decode_and_training_agree():
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Other implementations of experts take no float64. In bfloat16 a router may choose other experts than in float64.
    model = load(CHECKPOINT, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.randint(model.config.vocab_size, (2, TOKENS))
    exact = prefill(copy.deepcopy(model).double(), ids)
    eager = {run: run(model, ids) for run in (prefill, decode, training)}
    model.compile(backend="mla")
    for run, plain in eager.items():
        before = len(mla_compile.reports())
        assert_as_close_as_eager(run(model, ids), plain, exact)
        new = mla_compile.reports()[before:]
        assert new
        assert all(site.rewritten for report in new for site in report.sites)
        torch._dynamo.reset()
