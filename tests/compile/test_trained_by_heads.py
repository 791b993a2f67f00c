"""Functions of the scores where gradients are needed: a group of heads at a time, forward and backward."""

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
from mla_compile.passes.paths import trained_by_heads
from tests.compile.layers import Layer, hidden, stock
from tests.models import Combined, L, N, P, R, V
from tests.training import Rewritten, assert_every_gradient, assert_gradients_close, assert_gradients_of, gradients

TOKENS = 64


@pytest.fixture(params=[1, 1 << 26], ids=["one head at a time", "all heads at once"])
def scores_bytes(request, monkeypatch):
    monkeypatch.setattr(trained_by_heads, "SCORES_BYTES", request.param)


class Capped(Layer):
    """A soft cap, under a causal mask."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return self.function(scores).masked_fill(~seen, -math.inf).softmax(-1)

    def function(self, scores: Tensor) -> Tensor:
        return 3 * torch.tanh(scores / 3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q @ k.mT * q.shape[-1] ** -0.5) @ v


class Learned(Capped):
    """A cap that every head learns, a bias of positions, and a sink."""

    def __init__(self) -> None:
        super().__init__()
        self.cap = nn.Parameter(torch.linspace(1, 3, N))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 200))
        self.sink = nn.Parameter(torch.linspace(-1, 1, N))

    def function(self, scores: Tensor) -> Tensor:
        cap, place = self.cap[:, None, None], torch.arange(scores.shape[-1])
        return cap * torch.tanh(scores / cap) + self.bias[place[:, None] - place + 100]

    def weights(self, scores: Tensor) -> Tensor:
        sink = self.sink[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.cat([self.function(scores), sink], dim=-1).softmax(-1)[..., :-1]


class TwoScores(Capped):
    """One product of its own for the rope keys, and a function of their sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q[..., :P] @ k[..., :P].mT + q[..., P:] @ k[..., P:].mT
        return self.weights(scores * q.shape[-1] ** -0.5) @ v


class Blind(Capped):
    """The first token sees no key."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
        return torch.ops.aten._safe_softmax(self.function(scores).masked_fill(~seen, -math.inf), -1)


class ExpTwo(Capped):
    def weights(self, scores: Tensor) -> Tensor:
        powers = self.function(scores).exp2()
        return powers / powers.sum(-1, keepdim=True)


class Clamped(Capped):
    """torch's derivative of `clamp` writes to what it computed."""

    def function(self, scores: Tensor) -> Tensor:
        return scores.clamp(-0.5, 0.5)


LAYERS = [Capped, Learned, TwoScores, Blind, ExpTwo, Clamped]


@pytest.mark.diagonal
@pytest.mark.usefixtures("scores_bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_gradient_is_as_close_to_float64_as_eager(kind, dtype):
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind().to(dtype), [hidden(dtype)])
    (outcome,) = rewritten.outcomes
    assert (outcome.path, outcome.reason) == ("chunked", trained_by_heads.TrainedByHeads.why)
    assert len(rewritten.nodes(OVER_GROUPS)) == 1


def test_gradients_by_differences():
    """Of what the function of the scores reads, of the input and of the up-projection."""
    torch.manual_seed(0)
    module, x = Learned().double(), hidden(torch.float64, tokens=3)[:1].requires_grad_()
    rewritten = Rewritten(module)
    weights = [module.cap, module.bias, module.sink, module.mla.kv_b_proj.weight]
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda *_: rewritten(x), (x, *weights), fast_mode=True)
    assert len(rewritten.nodes(OVER_GROUPS)) == 1


def compiled(module, **options):
    torch._dynamo.reset()
    return torch.compile(module, backend="mla", options=options)


def assert_compiled(dynamic, kind=Learned):
    module, x = kind(), hidden()
    torch._dynamo.reset()
    assert_gradients_of(torch.compile(module, backend="mla", dynamic=dynamic), module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


SIZES = {"known sizes": False, "symbolic sizes": True}


@pytest.mark.usefixtures("scores_bytes", "without_codegen")
@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(False, id="known sizes"), pytest.param(True, marks=pytest.mark.slow, id="symbolic sizes")],
)
def test_compiled(dynamic):
    assert_compiled(dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", SIZES.values(), ids=SIZES)
def test_with_generated_code(dynamic, monkeypatch):
    """The code has a loop over heads."""
    monkeypatch.setattr(trained_by_heads, "SCORES_BYTES", 1)
    assert_compiled(dynamic, kind=Capped)


@pytest.mark.slow
@pytest.mark.usefixtures("scores_bytes")
@pytest.mark.parametrize("dynamic", SIZES.values(), ids=SIZES)
def test_with_generated_code_of_what_learns(dynamic):
    assert_compiled(dynamic)


class Autocast(Capped):
    """Turns autocast on for its attention alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().attend(q, k, v).to(q.dtype)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [pytest.param(Capped, marks=pytest.mark.slow), Autocast])
def test_under_autocast(kind):
    torch.manual_seed(0)
    module, x = kind(), hidden()
    wide = Capped().double()
    wide.load_state_dict(module.state_dict())
    exact = gradients(wide, wide, [x.double()])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is Capped):
        eager, found = gradients(module, module, [x]), gradients(compiled(module), module, [x])
    assert_gradients_close(found, eager, exact)
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


class Dropped(Capped):
    """Random dropout on the scores."""

    def function(self, scores: Tensor) -> Tensor:
        return super().function(nn.functional.dropout(scores, 0.5))


def test_a_function_that_is_another_each_time_stays_as_it_is():
    module = Dropped()
    rewritten = Rewritten(module)
    gradients(rewritten, module, [hidden()])
    assert not rewritten.outcomes[0].rewritten


class Sliced(Capped):
    """Latents that are a slice, as of a cache with room for more tokens: no view can merge their rows."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().latents(x)
        return nn.functional.pad(latent / 8, (0, 0, 0, 3)).cumsum(1)[:, :-3], k_rope

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        kv = torch.einsum("btl,ndl->bntd", latent, self.mla.kv_b_proj.weight.view(N, P + V, L))
        return kv.split([P, V], dim=-1)


def test_latents_that_are_a_slice():
    torch.manual_seed(0)
    rewritten = assert_every_gradient(Sliced(), [hidden()])
    assert len(rewritten.nodes(OVER_GROUPS)) == 1


def assert_gradients_compiled(module: nn.Module) -> None:
    """Check that the gradients of a compiled module are eager's, and that its attention is rewritten."""
    x = hidden()
    assert_gradients_of(compiled(module), module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.usefixtures("without_codegen")
def test_latents_that_are_a_slice_compiled():
    assert_gradients_compiled(Sliced())


@pytest.mark.usefixtures("without_codegen")
def test_frozen_weights_have_no_gradient():
    module, x = Learned(), hidden()
    module.requires_grad_(False)
    module.cap.requires_grad_(True)
    assert_gradients_of(compiled(module), module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.usefixtures("without_codegen")
def test_neither_scores_nor_keys_are_kept():
    module, x = Capped(), hidden(tokens=TOKENS).requires_grad_()

    def kept(backend):
        torch._dynamo.reset()
        function = functools.partial(torch.compile(module, backend=backend, dynamic=False), x)
        return kept_for_backward(function, (x, *module.parameters())) / (x.shape[0] * TOKENS * 4)

    ours, theirs = kept("mla"), kept(stock)
    layer = N * (P + R) + L + R + N * V
    assert ours <= 2 * layer + 2 * L + 4, "what the attention reads, and what the layer keeps of it besides"
    assert theirs > ours + N * TOKENS


@pytest.mark.usefixtures("without_codegen")
def test_queries_are_computed_again_if_asked():
    module, x = Capped(), hidden()
    module.mla = Combined(True)
    assert_gradients_of(compiled(module, **{"mla.recompute": "queries"}), module, [x])
    assert mla_compile.last_report().sites[0].reason.endswith(", and so are queries")


@pytest.mark.usefixtures("without_codegen")
def test_a_checkpoint():
    """Nothing is kept, not even scores: the loop runs again."""
    module, x = Capped(), hidden()
    torch._dynamo.reset()
    step = torch.compile(lambda x: checkpoint(module, x, use_reentrant=False), backend="mla")
    assert_gradients_of(step, module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]
    given = x.clone().requires_grad_()
    assert not kept_for_backward(lambda: step(given), (given, *module.parameters()))


class Ropeless(Capped):
    """Keys that are one up-projection and nothing beside it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.mla.q_proj(x).unflatten(2, (N, P + R))[..., :P].transpose(1, 2)
        latent, _ = self.latents(x)
        return self.mla.o_proj(self.attend(q, *self.up_projected(latent)).transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("without_codegen")
def test_keys_without_rope_compiled():
    """Inductor decomposes a `cat` of one tensor into one with other strides than those of the trace."""
    assert_gradients_compiled(Ropeless())


@pytest.mark.slow
@torch.enable_grad()
def test_keys_that_grow_by_a_number_of_tokens() -> None:
    """The graphs of a loop get the symbol that sizes are made of. Here there are past + 3 keys."""
    torch.manual_seed(0)
    w_q, w_d, w_k, w_v = (torch.randn(shape) / 4 for shape in ((16, 32), (16, 12), (12, 32), (12, 32)))
    weights = [weight.requires_grad_() for weight in (w_q, w_d, w_k, w_v)]

    def capped(
        x: torch.Tensor, past: torch.Tensor, q: torch.Tensor, d: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        latent = torch.cat([past, x @ d], dim=1)
        queries, keys, values = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (x @ q, latent @ k, latent @ v))
        scores = 5 * torch.tanh(queries @ keys.mT / 15)
        return scores.softmax(-1) @ values

    torch._dynamo.reset()
    compiled = torch.compile(capped, backend="mla")
    for count in (5, 6):
        x, past = torch.randn(2, 3, 16), torch.randn(2, count, 12)
        torch._dynamo.mark_dynamic(past, 1)
        found = torch.autograd.grad(compiled(x, past, *weights).square().sum(), weights)
        exact = [tensor.detach().double().requires_grad_() for tensor in weights]
        expected = torch.autograd.grad(capped(x.double(), past.double(), *exact).square().sum(), exact)
        eager = torch.autograd.grad(capped(x, past, *weights).square().sum(), weights)
        for ours, theirs, right in zip(found, eager, expected, strict=True):
            assert (ours - right).abs().max() <= 4 * (theirs - right).abs().max() + 1e-6 * right.abs().max()
    (site,) = mla_compile.last_report().sites
    assert site.path == "chunked"
    assert "+ 3" in str(site.shapes["T"])
