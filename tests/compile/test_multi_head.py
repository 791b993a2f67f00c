"""`nn.MultiheadAttention` whose keys and values are one latent: `kdim` and `vdim` are its width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager

HIDDEN, N, L = 48, 4, 12


class Layer(nn.Module):
    """Attention to the latents of all tokens."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, L)
        self.attention = nn.MultiheadAttention(HIDDEN, N, kdim=L, vdim=L, batch_first=True, **settings)

    def forward(self, x: Tensor, past: Tensor, **masks: Any) -> Tensor:
        latent = torch.cat([past, self.down(x)], 1)
        o, _ = self.attention(x, latent, latent, need_weights=False, **masks)
        assert isinstance(o, Tensor)
        return o


def layers(**settings: bool) -> tuple[Layer, Layer]:
    torch.manual_seed(0)
    layer, exact = Layer(**settings).eval(), Layer(**settings).double().eval()
    exact.load_state_dict({name: weight.double() for name, weight in layer.state_dict().items()})
    return layer, exact


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", [{}, {"bias": False, "add_zero_attn": True}], ids=["plain", "a null key"])
def test_a_step_attends_to_the_latents(padded: bool, settings: dict[str, bool]) -> None:
    layer, exact = layers(**settings)
    x, past = torch.randn(2, 1, HIDDEN), torch.randn(2, 30, L)
    masks = {"key_padding_mask": torch.arange(31) < torch.tensor([[3], [0]])} if padded else {}
    with torch.no_grad():
        o = torch.compile(layer, backend="mla")(x, past, **masks)
        expected = exact(x.double(), past.double(), **masks)
        assert_as_close_as_eager(o, layer(x, past, **masks), expected)
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.shapes["L"]) == ("absorbed", str(L))


@pytest.mark.usefixtures("without_codegen")
def test_it_is_trained() -> None:
    layer, exact = layers()
    x, past = torch.randn(2, 9, HIDDEN), torch.randn(2, 30, L)
    found = []
    for module, run, dtype in (
        (layer, torch.compile(layer, backend="mla"), x.dtype),
        (layer, layer, x.dtype),
        (exact, exact, torch.float64),
    ):
        with torch.enable_grad():
            o = run(x.to(dtype), past.to(dtype))
            found.append([o.detach(), *torch.autograd.grad(o.square().sum(), list(module.parameters()))])
    assert mla_compile.last_report().rewritten == 1
    for ours, eager, expected in zip(*found, strict=True):
        assert_as_close_as_eager(ours, eager, expected, factor=8.0)  # sums of keys and values in another order too


@pytest.mark.usefixtures("without_codegen")
def test_a_step_that_returns_its_weights_under_a_mask_attends_to_the_latents() -> None:
    layer, exact = layers()
    layer.attention.register_forward_pre_hook(_asks_for_weights, with_kwargs=True)
    exact.attention.register_forward_pre_hook(_asks_for_weights, with_kwargs=True)
    x, past = torch.randn(2, 1, HIDDEN), torch.randn(2, 30, L)
    masks = {"key_padding_mask": torch.arange(31) < torch.tensor([[3], [0]])}
    with torch.no_grad():
        o = torch.compile(layer, backend="mla")(x, past, **masks)
        expected = exact(x.double(), past.double(), **masks)
        assert_as_close_as_eager(o, layer(x, past, **masks), expected)
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.shapes["L"]) == ("absorbed", str(L))


def _asks_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "need_weights": True}


@pytest.mark.usefixtures("without_codegen")
def test_the_step_of_a_decoder_layer_attends_to_its_memory_and_not_to_keys_of_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(HIDDEN, N, 2 * HIDDEN, batch_first=True).eval()
    exact = nn.TransformerDecoderLayer(HIDDEN, N, 2 * HIDDEN, batch_first=True).double().eval()
    exact.load_state_dict({name: weight.double() for name, weight in layer.state_dict().items()})
    x, memory = torch.randn(2, 1, HIDDEN), torch.randn(2, 200, HIDDEN)
    padding = torch.arange(200) > torch.tensor([[150], [199]])
    with torch.no_grad():
        o = torch.compile(layer, backend="mla")(x, memory, memory_key_padding_mask=padding)
        expected = exact(x.double(), memory.double(), memory_key_padding_mask=padding)
        assert_as_close_as_eager(o, layer(x, memory, memory_key_padding_mask=padding), expected)
    of_itself, of_memory = mla_compile.last_report().sites
    assert "found one: its value is the result" in of_itself.reason
    assert (of_memory.path, of_memory.shapes["T"]) == ("absorbed", "200")


def test_torchs_cache_serves_it() -> None:
    layer, _ = layers()
    counters = torch._dynamo.utils.counters["aot_autograd"]
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(layer, backend="mla")(torch.randn(2, 1, HIDDEN), torch.randn(2, 30, L))
        assert mla_compile.last_report().rewritten == 1
    assert (counters["autograd_cache_bypass"], counters["autograd_cache_hit"]) == (0, 1)
    assert "passes" not in mla_compile.last_report().seconds
