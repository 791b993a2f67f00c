"""Queries of a trained attention: read where the model projects them, and with the gradients that they have there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compile.layers import Layer, assert_trained, hidden
from tests.models import HIDDEN, N, P, R

pytestmark = pytest.mark.usefixtures("without_codegen")


class Convolved(Layer):
    """A convolution with kernel 1, whose tokens are innermost."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, N * (P + R), 1)

    def queries(self, x):
        return self.conv(x.mT).mT.unflatten(2, (N, P + R))


class WeightsFirst(Layer):
    def queries(self, x):
        return (self.mla.q_proj.weight @ x.mT).mT.unflatten(2, (N, P + R))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [Convolved, WeightsFirst])
def test_queries_whose_tokens_are_innermost(layer, dtype):
    assert_trained(layer().to(dtype), hidden(dtype), rewritten=1)


class PartlyFixed(Layer):
    """The first two heads are computed without gradients, by the projection of all others."""

    def projected(self, x):
        return self.mla.q_proj(x)

    def queries(self, x):
        with torch.no_grad():
            fixed = self.projected(x).unflatten(2, (N, P + R))
        learned = self.projected(x).unflatten(2, (N, P + R))
        return torch.cat([fixed[:, :, :2], learned[:, :, 2:]], dim=2)


class PartlyFixedOfTokens(PartlyFixed):
    """The same, projected from tokens side by side."""

    def projected(self, x):
        return self.mla.q_proj(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("layer", [PartlyFixed, PartlyFixedOfTokens])
def test_queries_with_and_without_gradients(layer):
    """Both have the same numbers, but one product with the gradients of one of them cannot serve both."""
    assert_trained(layer(), hidden(), rewritten=1)


class InParts(Layer):
    """One softmax, whose heads meet the values in two products."""

    def attend(self, q, k, v):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        few, others = (q @ k.mT / 9).masked_fill(~seen, -torch.inf).softmax(-1).split([2, N - 2], 1)
        return torch.cat([few @ v[:, :2], 2 * (others @ v[:, 2:])], 1)


def test_products_of_some_heads():
    assert_trained(InParts(), hidden(), rewritten=2, outcomes=2)


class Fixed(Layer):
    def queries(self, x):
        with torch.no_grad():
            return self.mla.q_proj(x).unflatten(2, (N, P + R))


def test_queries_without_gradients():
    assert_trained(Fixed(), hidden(), rewritten=1)


class WrittenLater(Layer):
    """The projection is written to after the attention, and computed again for something else."""

    def forward(self, x):
        self.projected = self.mla.q_proj(x)
        o = super().forward(x)
        self.projected.mul_(2)
        return o + self.mla.q_proj(x).mean() + self.projected.mean()

    def queries(self, x):
        return self.projected.clone().unflatten(2, (N, P + R))


def test_a_projection_that_is_written_to_later():
    assert_trained(WrittenLater(), hidden(), rewritten=1)
