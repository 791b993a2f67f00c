"""Variants of one function: once a size of a tensor varies, all its sizes are dynamic; the last variant warns."""

import pytest
import torch
from torch import nn

import mla_compile

L, R, N, P, V, HIDDEN = 8, 4, 2, 4, 4, 12


class Layer(nn.Module):
    """MLA without rope. It returns its latent cache with the new tokens appended."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, N * P)
        self.down = nn.Linear(HIDDEN, L)
        self.up = nn.Linear(L, N * (P + V))

    def forward(self, x, past, bias=None):
        batch, tokens, _ = x.shape
        latent = torch.cat([past, self.down(x)], dim=1)
        k, v = self.up(latent).view(batch, -1, N, P + V).transpose(1, 2).split([P, V], dim=-1)
        q = self.q(x).view(batch, tokens, N, P).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias), latent


def call(layer, batch, past, bias=False):
    tensors = torch.randn(batch, 1, HIDDEN), torch.randn(batch, past, L)
    return layer(*tensors, torch.randn(1, past + 1) if bias else None)


@pytest.mark.usefixtures("without_codegen")
def test_a_tensor_that_grows_is_compiled_for_any_batch_when_it_has_grown():
    layer = torch.compile(Layer(), backend="mla")
    for batch, past in [(2, 5), (2, 6), (3, 7), (4, 7), (4, 90)]:
        o, latent = call(layer, batch, past)
        assert o.shape == (batch, N, 1, V)
        assert latent.shape == (batch, past + 1, L)
    assert len(mla_compile.reports()) <= 2 + 1  # of one size, of a longer cache, and of any batch of hidden states


class Regions(nn.Module):
    """Layers whose code torch traces once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    @torch.compiler.nested_compile_region
    def layer(self, of, x, past):
        return of(x, past)

    def forward(self, x, pasts):
        return [self.layer(layer, x, past) for layer, past in zip(self.layers, pasts, strict=True)]


@pytest.mark.usefixtures("without_codegen")
def test_caches_grow_in_compile_regions():
    model = Regions()
    compiled = torch.compile(model, backend="mla", options={"mla.path": "absorbed"})
    pasts = [torch.zeros(2, 0, L), torch.zeros(2, 0, L)]
    for tokens in (6, 1, 1, 3):
        x = torch.randn(2, tokens, HIDDEN)
        found, expected = compiled(x, pasts), model(x, pasts)
        torch.testing.assert_close(found, expected)
        assert mla_compile.last_report().rewritten == 2
        pasts = [latent for _, latent in found]


@pytest.mark.usefixtures("without_codegen")
def test_the_last_variant_says_which_function_it_is_what_differed_and_what_to_do():
    layer = torch.compile(Layer(), backend="mla")
    with torch._dynamo.config.patch(recompile_limit=2):
        call(layer, 2, 5)
        with pytest.warns(UserWarning, match="the last that torch compiles") as caught:
            call(layer, 2, 5, bias=True)
    (text,) = [str(one.message) for one in caught if "the last that torch" in str(one.message)]
    assert "variant 2 of forward of Layer (tests/compile/test_variants.py:" in text
    assert "bias: none, [1, any]" in text
    assert "torch._dynamo.config.recompile_limit = 16" in text


@pytest.mark.usefixtures("without_codegen")
def test_modes_and_dtypes_are_named_as_what_differed():
    """Not the length of the cache, which is compiled for any length but was the same in all calls."""
    layer = torch.compile(Layer(), backend="mla", options={"mla.path": "chunked"})
    given = torch.randn(2, 1, HIDDEN), torch.randn(2, 5, L)
    with torch._dynamo.config.patch(recompile_limit=4):
        layer(*given)
        with torch.enable_grad():
            layer(*given)
        with torch.autocast("cpu", torch.bfloat16):
            layer(*given)
        layer.bfloat16()
        with pytest.warns(UserWarning, match="the last that torch compiles") as caught:
            layer(*(tensor.bfloat16() for tensor in given))
    (text,) = [str(one.message) for one in caught if "the last that torch" in str(one.message)]
    found = text[text.index("What differed: ") : text.index(". Set ")]
    assert found == (
        "What differed: x.dtype and 1 others: float32, bfloat16; gradients: off, on; autocast of cpu: off, bfloat16"
    )


@pytest.mark.usefixtures("without_codegen")
def test_layers_of_a_graph_that_breaks_are_named_as_what_differed():
    class Numbered(Layer):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x, past):
            return super().forward(x * self.number, past)

    def model(x, past):
        for layer in layers:
            torch._dynamo.graph_break()
            layer(x, past)

    layers = nn.ModuleList([Numbered(1), Numbered(2)])
    said = pytest.warns(UserWarning, match=r"variant 2 of forward of Numbered .* What differed: self: 2 of them")
    with torch._dynamo.config.patch(recompile_limit=2), said:
        torch.compile(model, backend="mla")(torch.randn(2, 1, HIDDEN), torch.randn(2, 5, L))


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.filterwarnings("error")
def test_a_cache_that_stays_as_long_is_not_compiled_for_any_length():
    layer = torch.compile(Layer(), backend="mla")
    call(layer, 2, 5)
    call(layer, 2, 5)
    assert len(mla_compile.reports()) == 1
