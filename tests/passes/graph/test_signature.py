"""Layers that are the same code are traced once, also where torch gives each cache a length of its own."""

import pytest
import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes_config

import mla_compile
from mla_compile.passes.graph import rewriter as rewrite
from tests.models import HIDDEN, Combined, L, R


class Stack(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Combined() for _ in range(layers))

    def forward(self, x, caches):
        grown = []
        for layer, cache in zip(self.layers, caches, strict=True):
            o, cache = layer(x, cache)
            x = x + o
            grown.append(cache)
        return x, grown


@pytest.fixture
def traced(monkeypatch):
    """The paths of the sites that were traced."""
    paths = []
    trace = rewrite.graph_of
    monkeypatch.setattr(rewrite, "graph_of", lambda emit, values: paths.append(emit.path) or trace(emit, values))
    return paths


def caches(*lengths):
    return [(torch.randn(1, length, L), torch.randn(1, length, R)) for length in lengths]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("lengths", "times"), [((40, 40, 40), 1), ((40, 24, 40), 2)], ids=["equal", "one differs"])
def test_lengths_of_their_own(traced, lengths, times):
    model = Stack().eval()
    compiled = torch.compile(model, backend="mla", dynamic=True)
    x, given = torch.randn(1, 1, HIDDEN), caches(*lengths)
    with symbolic_shapes_config.patch(use_duck_shape=False):
        o, grown = compiled(x, given)
    assert traced == ["absorbed"] * times
    symbols = {site.shapes["T"] for site in mla_compile.last_report().sites}
    assert len(symbols) == 3, "the premise: three lengths for torch"
    wanted, wanted_grown = model(x, given)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(grown, wanted_grown)
    for more in (lengths, tuple(length + 3 for length in lengths)):  # the same code serves other lengths
        given = caches(*more)
        torch.testing.assert_close(compiled(x, given)[0], model(x, given)[0])
