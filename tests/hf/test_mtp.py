"""`generate(use_mtp=True)`: a compiled model checks tokens that its multi-token-prediction layers propose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import modeling_layers

from tests.hf.families import FAMILIES, Watch, build, interpreted, some_ids

FAMILY = FAMILIES["deepseek_v3"]
OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def random_layers(model: nn.Module, **_: Any) -> nn.Module:
    """Random layers in place of those that a checkpoint would have."""
    torch.manual_seed(3)
    layers = modeling_layers.MtpModel(model, model.config.num_mtp_layers).eval()
    layers.tie_with_main_model(model)
    shared = {id(parameter) for parameter in model.parameters()}
    for parameter in layers.parameters():
        if parameter.dim() > 1 and id(parameter) not in shared:
            nn.init.normal_(parameter, std=model.config.initializer_range)
    return layers


@pytest.mark.slow
def test_tokens_are_those_without_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", random_layers)
    model, ids = build(FAMILY, "sdpa"), some_ids()[:1]
    with torch.no_grad():
        expected = model.generate(ids, **OPTIONS)
        watch = Watch()
        with interpreted(FAMILY):
            model.compile(backend=watch)
            assert torch.equal(model.generate(ids, use_mtp=True, **OPTIONS), expected)
    sites = [site for report in watch.ran for site in report.sites]
    assert {site.path for site in sites} == {"chunked", "absorbed"}
