"""Attention that is absorbed by hand, where gradients are needed: scores are computed again in the backward."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mla_compile
from mla_compile.bench.memory import kept_for_backward
from mla_compile.passes.code.differentiable import OVER_GROUPS
from tests.compile.layers import Layer, hidden, stock
from tests.models import HIDDEN, N, P, R, V, rope
from tests.models import L as RANK
from tests.training import Rewritten, assert_every_gradient, assert_gradients_of, gradients

latent_attention = torch.ops.mla.latent_attention.default


class Absorbed(Layer):
    """Queries times W_UK attend to the latents, whose sums are multiplied by W_UV. Subclasses change parts of this."""

    keys_are_latents = values_are_latents = True

    def forward(self, x: Tensor) -> Tensor:
        w_uk, w_uv = self.mla.kv_b_proj.weight.unflatten(0, (N, P + V)).split([P, V], dim=1)
        q_nope, q_rope = self.mla.q_proj(x).unflatten(2, (N, P + R)).split([P, R], dim=-1)
        latent, k_rope = self.latents(x)
        k = v = latent[:, None]
        if self.keys_are_latents:
            q_nope = torch.einsum("bsnp,npl->bsnl", q_nope, w_uk)
        else:
            k = torch.einsum("btl,npl->bntp", latent, w_uk)
        if not self.values_are_latents:
            v = torch.einsum("btl,nvl->bntv", latent, w_uv)
        k_rope = rope(k_rope[:, :, None], 0).transpose(1, 2)
        k = torch.cat([k, k_rope.expand(-1, k.shape[1], -1, -1)], dim=-1)
        q = torch.cat([q_nope, rope(q_rope, 0)], dim=-1).transpose(1, 2)
        o = self.attend(q, k, v).transpose(1, 2)
        if self.values_are_latents:
            o = torch.einsum("bsnl,nvl->bsnv", o, w_uv)
        return self.mla.o_proj(o.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1).to(v.dtype) @ v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * (P + R) ** -0.5
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


class ValuesExpanded(Absorbed):
    values_are_latents = False


class KeysExpanded(Absorbed):
    keys_are_latents = False


class Biased(Absorbed):
    """A bias of positions and a sink, both learned."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 200))
        self.sink = nn.Parameter(torch.linspace(-1, 1, N))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.scores(q, k)
        place = torch.arange(scores.shape[-1])
        scores = scores + self.bias[place[:, None] - place + 100]
        sink = self.sink[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v


class Capped(Absorbed):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 3 * torch.tanh(super().scores(q, k) / 3)


class CappedValuesExpanded(Capped):
    values_are_latents = False


class CappedKeysExpanded(Capped):
    keys_are_latents = False


LAYERS = [Absorbed, ValuesExpanded, KeysExpanded, Biased, CappedValuesExpanded, CappedKeysExpanded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_gradient_is_as_close_to_float64_as_eager(kind, dtype):
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind().to(dtype), [hidden(dtype)])
    (outcome,) = rewritten.outcomes
    assert len(rewritten.nodes(OVER_GROUPS if issubclass(kind, Capped) else latent_attention)) == 1
    assert outcome.path == ("chunked" if issubclass(kind, Capped) else "absorbed")


class OverGivenLatents(nn.Module):
    """Scores over latents that are an input, times a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uk, self.w_uv = (nn.Parameter(torch.randn(N, size, RANK) / RANK**0.5) for size in (P, V))
        self.scale = nn.Parameter(torch.tensor(P**-0.5))

    def forward(self, q: Tensor, latent: Tensor) -> Tensor:
        latent = latent[:, None]
        return (q @ self.w_uk @ latent.mT * self.scale).softmax(-1) @ latent @ self.w_uv.mT


def test_a_learned_number_of_all_scores_has_its_gradient():
    torch.manual_seed(0)
    q, latent = torch.randn(2, N, 7, P, requires_grad=True), torch.randn(2, 11, RANK, requires_grad=True)
    (outcome,) = assert_every_gradient(OverGivenLatents(), [q, latent]).outcomes
    assert outcome.path == "absorbed"


def test_a_function_of_scores_without_up_projections_stays_as_it_is():
    module = Capped()
    rewritten = Rewritten(module)
    gradients(rewritten, module, [hidden()])
    (outcome,) = rewritten.outcomes
    assert outcome.reason.startswith(
        "expected an up-projection that tells heads from queries, found a function of scores that are absorbed"
    )


def test_the_report_says_so():
    module = ValuesExpanded()
    rewritten = Rewritten(module)
    gradients(rewritten, module, [hidden()])
    words = "the keys are the latent already: absorbed by hand; scores are computed again for gradients"
    assert rewritten.outcomes[0].reason == words


@pytest.mark.parametrize("kind", [Absorbed, ValuesExpanded, KeysExpanded])
def test_gradients_by_differences(kind):
    torch.manual_seed(0)
    module, x = kind().double(), hidden(torch.float64, tokens=3)[:1].requires_grad_()
    rewritten = Rewritten(module)
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda *_: rewritten(x), (x, *module.parameters()), fast_mode=True)
    assert len(rewritten.nodes(latent_attention)) == 1


def test_only_what_learns_has_a_gradient_computed():
    module = Absorbed().requires_grad_(False)
    module.mla.q_proj.weight.requires_grad_(True)
    asked = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.mla.latent_attention_backward.default:
                asked.append(args[-1])
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        output = Rewritten(module)(hidden())
        with Calls():
            output.sum().backward()
    assert asked == [[True, True, False, False, False]]


def test_a_checkpoint():
    module, x = Absorbed(), hidden()
    rewritten = Rewritten(lambda x: checkpoint(module, x, use_reentrant=False))
    assert_gradients_of(rewritten, module, [x])
    assert len(rewritten.nodes(latent_attention)) == 1


SIZES = {"known sizes": False, "symbolic sizes": True}


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(False, id="known sizes"), pytest.param(True, marks=pytest.mark.slow, id="symbolic sizes")],
)
def test_compiled(dynamic):
    assert_compiled(dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", SIZES.values(), ids=SIZES)
def test_with_generated_code(dynamic):
    assert_compiled(dynamic)


def assert_compiled(dynamic):
    module, x = Biased(), hidden()
    torch._dynamo.reset()
    assert_gradients_of(torch.compile(module, backend="mla", dynamic=dynamic), module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["absorbed"]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [Absorbed, ValuesExpanded, pytest.param(KeysExpanded, marks=pytest.mark.slow)])
def test_no_scores_are_kept(kind):
    """The bound, for each token: queries, latents, outputs in latent space, these again for their product with W_UV,
    the log-sum-exp, and what the layer itself keeps."""
    tokens = 128
    module, x = kind(), hidden(tokens=tokens).requires_grad_()

    def kept(backend):
        torch._dynamo.reset()
        function = functools.partial(torch.compile(module, backend=backend, dynamic=False), x)
        return kept_for_backward(function, (x, *module.parameters())) / (x.shape[0] * tokens * 4)

    weights = 2 * N * RANK * (P + V) / (x.shape[0] * tokens)
    layer = N * (RANK + R) + 2 * RANK + 1 + R + 2 * N * RANK + N + N * (P + V) + HIDDEN + weights
    assert kept("mla") <= layer
    assert kept(stock) > layer + N * tokens // 2
