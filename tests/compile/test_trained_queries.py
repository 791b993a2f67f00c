"""Queries of a trained attention: read where the model projects them, and with the gradients that they have there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compile.layers import Layer, assert_trained, hidden
from tests.models import HIDDEN, N, P, R, rope

pytestmark = pytest.mark.usefixtures("without_codegen")


class Queries(Layer):
    """Subclasses say how queries `[B, S, N, P + R]`, before rope, are projected from hidden states."""

    def project(self, x):
        raise NotImplementedError

    def forward(self, x):
        q_nope, q_rope = self.project(x).split([P, R], dim=-1)
        q = torch.cat([q_nope, rope(q_rope, 0)], dim=-1).transpose(1, 2)
        latent, k_rope = self.latents(x)
        k_rope = rope(k_rope[:, :, None], 0).transpose(1, 2)
        k_nope, v = self.up_projected(latent)
        k = torch.cat([k_nope, k_rope.expand(-1, N, -1, -1)], dim=-1)
        return self.mla.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Convolved(Queries):
    """A convolution with kernel 1, whose tokens are innermost."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, N * (P + R), 1)

    def project(self, x):
        return self.conv(x.mT).mT.unflatten(2, (N, P + R))


class WeightsFirst(Queries):
    def project(self, x):
        return (self.mla.q_proj.weight @ x.mT).mT.unflatten(2, (N, P + R))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [Convolved, WeightsFirst])
def test_queries_whose_tokens_are_innermost(layer, dtype):
    assert_trained(layer().to(dtype), hidden(dtype), rewritten=1)


class PartlyFixed(Queries):
    """The first two heads are computed without gradients, by the projection of all others."""

    def project(self, x):
        with torch.no_grad():
            fixed = self.mla.q_proj(x)
        heads = (q.unflatten(2, (N, P + R)) for q in (fixed, self.mla.q_proj(x)))
        return torch.cat([own[:, :, part] for own, part in zip(heads, (slice(2), slice(2, N)), strict=True)], dim=2)


class PartlyFixedOfTokens(PartlyFixed):
    """The same, projected from tokens side by side."""

    def project(self, x):
        tokens = x.flatten(0, 1)
        with torch.no_grad():
            fixed = self.mla.q_proj(tokens)
        heads = (q.view(*x.shape[:2], N, P + R) for q in (fixed, self.mla.q_proj(tokens)))
        return torch.cat([own[:, :, part] for own, part in zip(heads, (slice(2), slice(2, N)), strict=True)], dim=2)


@pytest.mark.parametrize("layer", [PartlyFixed, PartlyFixedOfTokens])
def test_queries_with_and_without_gradients(layer):
    """Both are one value, so that one product would serve both, with the gradients of one of them."""
    compiled = assert_trained(layer(), hidden(), rewritten=0)
    assert compiled.outcomes[0].reason.startswith("expected operands that all need gradients or none")


class Fixed(Queries):
    def project(self, x):
        with torch.no_grad():
            return self.mla.q_proj(x).unflatten(2, (N, P + R))


def test_queries_without_gradients():
    assert_trained(Fixed(), hidden(), rewritten=1)


class WrittenLater(Queries):
    """The projection is written to after the attention, and computed again for something else."""

    def forward(self, x):
        self.projected = self.mla.q_proj(x)
        o = super().forward(x)
        self.projected.mul_(2)
        return o + self.mla.q_proj(x).mean() + self.projected.mean()

    def project(self, x):
        return self.projected.clone().unflatten(2, (N, P + R))


def test_a_projection_that_is_written_to_later():
    assert_trained(WrittenLater(), hidden(), rewritten=1)
