"""Layers with the same code are traced once, even if torch gives the length of each cache its own symbol."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes_config

import mla_compile
from mla_compile.passes.attention.find import find
from mla_compile.passes.graph import rewriter as rewrite
from mla_compile.passes.graph.signature import signature
from mla_compile.passes.masks.dense import Dense
from mla_compile.passes.masks.kind import Kind
from mla_compile.passes.masks.meaning import Meaning
from mla_compile.passes.mla.prove import prove
from mla_compile.passes.trace.trace import Trace
from tests.models import HIDDEN, Combined, L, R
from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, run
from tests.passes.graphs import rewrite as rewrite_graph
from tests.passes.mla.test_near_misses import rotated


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
    monkeypatch.setattr(rewrite, "graph_of", lambda emit, values: paths.append(emit.path.name) or trace(emit, values))
    return paths


def caches(*lengths):
    return [(torch.randn(1, length, L), torch.randn(1, length, R)) for length in lengths]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("lengths", "times"),
    [
        pytest.param((40, 40, 40), 1, id="equal", marks=pytest.mark.slow),
        pytest.param((40, 24, 40), 2, id="one differs"),
    ],
)
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


@dataclass(frozen=True)
class First(Kind):
    """The first `count` keys are seen."""

    count: int
    reads = ()

    def tensor(self, pairs):
        return pairs.key < self.count


@dataclass(frozen=True)
class Behind(Kind):
    """The first `count` keys are hidden: another kind with the same fields."""

    count: int
    reads = ()

    def tensor(self, pairs):
        return pairs.key >= self.count


def test_kinds_of_equal_fields_are_not_the_same_code():
    module = capture(lambda *args: mla.sealed(*mla.naive(*args)), *mla.tensors())
    trace = Trace(module.graph)
    (found,) = find(module.graph, trace)
    site = prove(found, trace)
    sources = [node for node in module.graph.nodes if node.op != "output"]

    def of(*kinds):
        return signature(site, Dense.of(site, Meaning(kinds)), sources, None)

    assert of(First(3)) == of(First(3))
    assert len({of(First(3)), of(Behind(3)), of(First(4)), of(First(3), Behind(1))}) == 4


def test_layers_whose_results_differ_in_dtype_alone() -> None:
    """Weights are cast to the dtype of the values in one layer, and the values to that of the weights in the other."""
    tensors = [tensor.bfloat16() for tensor in mla.tensors()]
    for order in ((True, False), (False, True)):

        def layers(x, *more, order=order):
            outputs = []
            for i, wide in enumerate(order):
                q, k, v = mla.naive(x + i, *more)
                weights = (q @ k.mT * mla.SCALE).softmax(-1, dtype=torch.float32)
                outputs.append(weights @ v.float() if wide else weights.to(v.dtype) @ v)
            return tuple(outputs)

        module = capture(layers, *tensors)
        outcomes = rewrite_graph(module, "absorbed")
        assert [outcome.path for outcome in outcomes] == ["absorbed", "absorbed"]
        assert [o.dtype for o in run(module, *tensors)] == [o.dtype for o in layers(*tensors)]


@pytest.mark.parametrize("parts", [lambda c: c.chunk(2, -1), lambda c: (c[..., 0::2], c[..., 1::2])])
def test_layers_whose_latents_are_parts_of_one_tensor(parts) -> None:
    x, latent, *more = mla.tensors()
    latents = torch.cat([latent, latent.flip(1) * 2], -1)

    def layers(x, latents, k_rope, w_q, w_kv):
        outputs = []
        for latent in parts(latents):
            k, v = mla.up_projected(latent, w_kv)
            outputs.append(mla.sealed(rotated(mla.queries(x, w_q)[..., : mla.P]), rotated(k), v))
        return torch.stack(outputs)

    module = capture(layers, x, latents, *more)
    before = run(module, x, latents, *more)
    assert [outcome.path for outcome in rewrite_graph(module, "values")] == ["values", "values"]
    check_right(before, run(module, x, latents, *more))
