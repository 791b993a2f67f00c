"""Models under accelerate's hooks, which torch never compiles: the remedies of docs/troubleshooting.md help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

from tests.errors import assert_as_close_as_eager
from tests.hf.families import FAMILIES, Watch, exact, interpreted, merged, some_ids
from tests.hf.test_deepseek import build

FAMILY = FAMILIES["deepseek_v3"]


def everywhere(model: nn.Module) -> nn.Module:
    """A hook on every module, as for several devices."""
    return dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


def on_layers(model: nn.Module) -> nn.Module:
    model = everywhere(model)
    for layer in model.model.layers:
        for child in layer.children():
            remove_hook_from_submodules(child)
    return model


def offloaded(model: nn.Module) -> nn.Module:
    return cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=["DeepseekV3Attention"])


CASES = [
    pytest.param(everywhere, False, marks=pytest.mark.slow),
    pytest.param(on_layers, True, marks=pytest.mark.slow),
    pytest.param(offloaded, True, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("hooked", "rewritten"), CASES)
def test_attention_is_rewritten_where_no_hook_is_inside(hooked, rewritten) -> None:
    torch._dynamo.reset()
    model, ids = build("v3", layers=1), some_ids()
    expected, exactly = model(ids).logits, exact(model)(ids).logits
    model, watch = hooked(model), Watch()
    with interpreted(FAMILY):
        model.compile(backend=watch)
        logits = model(ids).logits
    assert_as_close_as_eager(logits, expected, exactly)
    sites = merged(watch.ran).sites
    assert sites
    assert all(site.rewritten == rewritten for site in sites)
    if not rewritten:
        assert "accelerate" in sites[0].remedy
