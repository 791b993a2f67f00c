"""Every MLA family of transformers is trained as it is: loss and the gradients of every weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

import mla_compile
from tests.hf.families import FAMILIES, Family, build, exact, interpreted, rewritten_attentions, some_ids
from tests.hf.test_training import gradients
from tests.training import assert_gradients_close

SOON = [("mistral_large4", "sdpa")]
"""Run by default: its layers share what an indexer has chosen."""
EVERY = [
    pytest.param(family, attention, marks=() if (family.name, attention) in SOON else pytest.mark.slow)
    for family in FAMILIES.values()
    for attention in rewritten_attentions(family)
]


@pytest.fixture(autouse=True)
def on_any_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with the settings of its family, for the same device on every machine."""
    with interpreted(request.node.callspec.params["family"]):
        yield


@pytest.mark.parametrize(("family", "attention"), EVERY, ids=lambda value: getattr(value, "name", value))
def test_all_layers_are_trained(family: Family, attention: str) -> None:
    model, ids = build(family, attention).train(), some_ids()
    batch = {"input_ids": ids, "labels": ids}
    wide = exact(model)
    truth, eager = gradients(wide, wide, batch), gradients(model, model, batch)
    found = gradients(torch.compile(model, backend="mla"), model, batch)
    assert sum(report.rewritten for report in mla_compile.reports()) == family.sites, mla_compile.reports()
    assert_gradients_close(found, eager, truth)
