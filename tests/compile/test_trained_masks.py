"""Masks and weights as people write them, where gradients are needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.compile.layers import Layer, assert_trained, hidden
from tests.training import assert_every_gradient


class Weighed(Layer):
    """A softmax by hand of scores that `weights_of` masks; the second token sees no key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() & (torch.arange(q.shape[2]) != 1)[:, None]
        return self.weights_of(q @ k.mT * q.shape[-1] ** -0.5, seen) @ v


class FullLike(Weighed):
    """What replaces hidden scores comes from `full_like`, through which no gradient goes."""

    def weights_of(self, scores: Tensor, seen: Tensor) -> Tensor:
        seen = seen | seen.logical_not().all(-1, keepdim=True)
        return torch.where(seen, scores, torch.full_like(scores, -torch.inf)).softmax(-1)


class MaskedAgain(Weighed):
    def weights_of(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -1e9).softmax(-1).masked_fill(~seen, 0.0)


class NoNumbers(Weighed):
    """Eager's own gradients are NaN."""

    def weights_of(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()


@pytest.mark.parametrize("kind", [FullLike, MaskedAgain, NoNumbers])
def test_every_gradient_of_masked_weights(kind: type[Weighed]) -> None:
    assert_trained(kind(), hidden(), 1)


class BiasedLatent(nn.Module):
    """Projections have biases, and attention weights are returned beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.down = nn.Linear(16, 32), nn.Linear(16, 8)
        self.keys, self.values = nn.Linear(8, 32), nn.Linear(8, 32)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 8)).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.down(x)
        weights = (self.heads(self.query(x)) @ self.heads(self.keys(latent)).mT).softmax(-1)
        return weights @ self.heads(self.values(latent)), weights


def test_keys_and_values_are_recomputed_from_a_latent_with_a_bias() -> None:
    (outcome,) = assert_every_gradient(BiasedLatent(), [torch.randn(2, 13, 16)]).outcomes
    assert outcome.rewritten
