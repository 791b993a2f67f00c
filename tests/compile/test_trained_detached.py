"""Training where gradients do not flow through a part of what the attention reads: it is read as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compile.layers import Layer, assert_trained, hidden
from tests.models import HIDDEN
from tests.training import assert_every_gradient


class StraightThrough(Layer):
    """Keys are rounded, with the gradients of those that are not."""

    def attend(self, q, k, v):
        return super().attend(q, k + self.error(k), v)

    def error(self, k):
        return (k.round() - k).detach()


class StraightThroughData(StraightThrough):
    def error(self, k):
        return (k.round() - k).data


class StraightThroughWithoutGradients(StraightThrough):
    def error(self, k):
        with torch.no_grad():
            return k.round() - k


class PartlyDetached(Layer):
    """A tenth of the gradient of the up-projected keys."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return 0.1 * k + 0.9 * k.detach(), v


class DetachedLatentOfValues(Layer):
    def up_projected(self, latent):
        k, _ = super().up_projected(latent)
        _, v = super().up_projected(latent.detach())
        return k, v


class GreatestOfValues(Layer):
    """The detached maximum of the scores is subtracted from them, and also scales the output."""

    def attend(self, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        greatest = scores.amax(-1, keepdim=True).detach()
        powers = (scores - greatest).exp()
        return (powers / powers.sum(-1, keepdim=True)) @ v * greatest


class LatentOfValuesWithoutGradients(Layer):
    def up_projected(self, latent):
        with torch.no_grad():
            same = latent * 1.0
        return super().up_projected(latent)[0], super().up_projected(same)[1]


class AddedWithGradients(Layer):
    """Keys that are computed without gradients, to which others are added with theirs."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        own = self.without(k * 0.5)
        own.add_(k)
        return own, v

    def without(self, k):
        return k.detach()


class AddedToData(AddedWithGradients):
    def without(self, k):
        return k.data


class AddedToSilent(AddedWithGradients):
    def without(self, k):
        with torch.no_grad():
            return k.clone()


class PartlyWrittenWithGradients(Layer):
    """Of the values, the last columns have gradients."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        with torch.no_grad():
            own = v.clone()
        own[..., 2:] = v[..., 2:]
        return k, own


@pytest.mark.parametrize("layer", [AddedWithGradients, AddedToData, AddedToSilent, PartlyWrittenWithGradients])
def test_what_gets_gradients_when_it_is_written_to_is_left(layer):
    assert_trained(layer(), hidden(), rewritten=0)


@pytest.mark.parametrize(
    "layer",
    [
        *[StraightThrough, StraightThroughData, StraightThroughWithoutGradients, PartlyDetached],
        *[DetachedLatentOfValues, LatentOfValuesWithoutGradients],
    ],
)
def test_gradients_end_where_the_code_ends_them(layer):
    assert_trained(layer(), hidden(), rewritten=1)


def test_a_detached_maximum_that_is_used_again():
    compiled = assert_every_gradient(GreatestOfValues(), [hidden()])
    assert compiled.outcomes[0].rewritten


class FiniteMaximum(Layer):
    """A softmax by hand under a detached maximum, which is 0 in rows that see no key."""

    def attend(self, q, k, v):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        greatest = scores.amax(-1, keepdim=True)
        powers = (scores - greatest.where(~greatest.isinf(), 0).detach()).exp()
        return powers / powers.sum(-1, keepdim=True).clamp_min(1e-9) @ v


def test_a_detached_maximum_that_is_made_finite():
    assert_trained(FiniteMaximum(), hidden(), rewritten=1)


class SharedIndices(nn.Module):
    """Two layers, for each of which the same mask is made of what an indexer of the first names."""

    def __init__(self):
        super().__init__()
        self.indexer, self.layers = nn.Linear(HIDDEN, 13), nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        with torch.no_grad():
            indices = self.indexer(x).topk(6).indices
        for layer in self.layers:
            mask = torch.zeros(x.shape[0], 13, 13, dtype=torch.bool).scatter(2, indices, True)[:, None]
            layer.attend = lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, mask)
            x = x + layer(x)
        return x


def test_one_mask_that_is_made_twice_without_gradients():
    assert_trained(SharedIndices(), hidden(), rewritten=2, outcomes=2)
