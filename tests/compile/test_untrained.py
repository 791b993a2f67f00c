"""Attention whose gradients are not those of the algebra, or that has dropout: unchanged, with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compile.layers import DetachedKeys, Layer, OneByOne, assert_trained, hidden
from tests.training import Rewritten, gradients


class NotRecorded(Layer):
    """Keys in a buffer of their own, written without gradients."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        buffer = torch.empty_like(k)
        with torch.no_grad():
            buffer.copy_(k)
        return buffer, v


class WrittenUnseen(Layer):
    """Keys are doubled without their gradient."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        k = k.clone()
        k.detach().mul_(2)
        return k, v


class Hooked(Layer):
    """A hook on the up-projected keys, above which the code would read other columns."""

    def attend(self, q, k, v):
        k.register_hook(lambda grad: 3 * grad)
        return super().attend(q, k + (k.round() - k).detach(), v)


class OneByOneDetached(OneByOne):
    def values(self, v):
        return v.detach()


class WithoutGradients(Layer):
    def up_projected(self, latent):
        with torch.no_grad():
            k, _ = super().up_projected(latent)
        return k, super().up_projected(latent)[1]


class Reversed(torch.autograd.Function):
    """The identity, with its gradient negated."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class OwnGradient(Layer):
    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return Reversed.apply(k), v


class Dropout(Layer):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (DetachedKeys, "where the trace stopped: gradients end here"),
        (WithoutGradients, "where the trace stopped: gradients end here"),
        (NotRecorded, "expected writes that gradients see, found one without gradients"),
        (WrittenUnseen, "expected keys of which some columns are an up-projection"),
        (OneByOneDetached, "where the trace stopped: gradients end here"),
        (OwnGradient, "expected "),
        (Hooked, "expected keys of which some columns are an up-projection"),
    ],
)
def test_where_gradients_are_not_those_of_the_algebra_nothing_changes(layer, reason):
    compiled = assert_trained(layer(), hidden(), rewritten=0)
    assert reason in compiled.outcomes[0].reason


def test_dropout_stays_as_it_is():
    module = Dropout()
    compiled = Rewritten(module)
    gradients(compiled, module, [hidden()])
    (outcome,) = compiled.outcomes
    assert outcome.reason.startswith("expected attention without dropout, found dropout_p=0.5")
