"""Training where gradients do not flow through a part of what the attention reads: it is read as it is."""

from __future__ import annotations

import pytest
import torch

from tests.compile.layers import Layer, assert_trained, hidden
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
