"""Attention whose weights are read elsewhere too, where gradients are needed: keys and values are recomputed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mla_compile
from mla_compile.bench.memory import kept_for_backward
from mla_compile.passes.paths.trained_with_scores import TrainedWithScores
from tests.compile.layers import Layer, hidden, stock
from tests.compile.test_trained_absorbed import Absorbed
from tests.models import N, P, R, V
from tests.training import Rewritten, assert_gradients_of, gradients


class Returned(Layer):
    """Attention weights beside the output."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.weights = self.weights_of(q @ k.mT * q.shape[-1] ** -0.5)
        return self.weights @ v

    def weights_of(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weights


class Written(Returned):
    """Keys are written into a buffer."""

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().up_projected(latent)
        buffer = torch.empty_like(k)
        buffer[..., :P].copy_(k)
        return buffer, v


class Mixed(Layer):
    """Scores of a head are mixed with those of the others."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return (scores + scores.mean(1, keepdim=True)).softmax(-1) @ v


class Gated(Returned):
    """Keys and values of a token are multiplied by one number. The latent times that is no tensor of the graph."""

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        gate = latent[:, None, :, :1].sigmoid()
        k, v = super().up_projected(latent)
        return k * gate, v * gate


class Einsum(Returned):
    """The latent is a product by `einsum`, whose views Dynamo's graph does not have."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w_latent, w_rope = self.mla.kv_a_proj.weight.split([self.mla.kv_norm.normalized_shape[0], R])
        return torch.einsum("btd,ld->btl", x, w_latent), x @ w_rope.T


def compiled(module, backend="mla"):
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, dynamic=False)


def assert_gradients_are_eagers(module):
    x = hidden()
    assert_gradients_of(compiled(module), module, [x])
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.reason) == ("chunked", TrainedWithScores.why)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [Returned, pytest.param(Written, marks=pytest.mark.slow), Mixed, Gated, Einsum])
def test_every_gradient_is_eagers(kind):
    assert_gradients_are_eagers(kind())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Returned, Written, Mixed])
def test_with_generated_code(kind):
    assert_gradients_are_eagers(kind())


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [Returned, pytest.param(Written, marks=pytest.mark.slow), Gated, Einsum])
def test_neither_keys_nor_values_are_kept(kind):
    tokens = 64
    module, x = kind(), hidden(tokens=tokens).requires_grad_()

    def kept(backend):
        function = functools.partial(compiled(module, backend), x)
        return kept_for_backward(function, (x, *module.parameters())) / (x.shape[0] * tokens * 4)

    assert kept("mla") <= kept(stock) - N * (P + R) - N * V + R, "keys and values less, the rope key more"


class Dropped(Returned):
    """Random dropout on the up-projected keys."""

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().up_projected(latent)
        return F.dropout(k, 0.5), v


class AbsorbedReturned(Absorbed):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.weights = self.scores(q, k).softmax(-1)
        return self.weights @ v

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weights


class Checkpointed(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Dropped, "expected "),
        (
            AbsorbedReturned,
            "expected an up-projection to recompute for gradients, found scores that are absorbed by hand",
        ),
        (Checkpointed, "expected scores that nothing else reads in a checkpoint, found scores that have to exist"),
    ],
)
def test_what_stays_as_it_is(kind, reason):
    module = kind()
    rewritten = Rewritten(module)
    gradients(rewritten, module, [hidden()])
    assert rewritten.outcomes[0].path == "unchanged"
    assert rewritten.outcomes[0].reason.startswith(reason)
