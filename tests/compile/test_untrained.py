"""Attention whose gradients are not those of the algebra, or that has dropout: unchanged, with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compile.layers import DetachedKeys, Layer, OneByOne, assert_trained, hidden
from tests.models import N, P, V
from tests.training import Rewritten, gradients

OWN_GRADIENT = "expected operations whose gradients are torch's own, found `autograd_function_apply` ("


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


class OwnGradientOfKeys(Layer):
    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return Reversed.apply(k), v


class OwnGradientOfValues(Layer):
    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return k, Reversed.apply(v)


class OwnGradientOfBoth(Layer):
    def up_projected(self, latent):
        kv = Reversed.apply(self.mla.kv_b_proj(latent)).unflatten(2, (N, P + V)).transpose(1, 2)
        return kv.split([P, V], dim=-1)


class OwnGradientOfWholeKeys(Layer):
    def attend(self, q, k, v):
        return super().attend(q, Reversed.apply(k), v)


class OwnGradientOfScores(Layer):
    def attend(self, q, k, v):
        return Reversed.apply(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class OwnGradientOfRope(Layer):
    """Rope keys have a gradient of their own, but it is the norm of each head's key that is in the way."""

    def latents(self, x):
        latent, k_rope = super().latents(x)
        return latent, Reversed.apply(k_rope)

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return F.rms_norm(k, (P,)), v


class OwnGradientOfInputs(Layer):
    """Of what attention reads beside its up-projections, and of what these start from."""

    def latents(self, x):
        latent, k_rope = super().latents(x)
        return Reversed.apply(latent), Reversed.apply(k_rope)

    def queries(self, x):
        return Reversed.apply(super().queries(x))

    def attend(self, q, k, v):
        return Reversed.apply(super().attend(q, k, v))


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
        (OwnGradientOfKeys, OWN_GRADIENT),
        (OwnGradientOfValues, OWN_GRADIENT),
        (OwnGradientOfBoth, OWN_GRADIENT),
        (OwnGradientOfWholeKeys, OWN_GRADIENT),
        (OwnGradientOfScores, OWN_GRADIENT),
        (OwnGradientOfRope, "which is computed from it as in a norm"),
        (Hooked, "expected keys of which some columns are an up-projection"),
    ],
)
def test_where_gradients_are_not_those_of_the_algebra_nothing_changes(layer, reason):
    compiled = assert_trained(layer(), hidden(), rewritten=0)
    assert reason in compiled.outcomes[0].reason


def test_the_line_of_a_function_with_its_own_gradient_ends_the_trail():
    compiled = Rewritten(module := OwnGradientOfValues())
    gradients(compiled, module, [hidden()])
    (outcome,) = compiled.outcomes
    assert "Reversed.apply(v)" in outcome.trail[-1]
    assert outcome.remedy == "write the function with torch's operations, or apply it to the latent"


def test_a_function_with_its_own_gradient_may_stand_around_the_attention():
    assert_trained(OwnGradientOfInputs(), hidden(), rewritten=1)


def test_dropout_stays_as_it_is():
    module = Dropout()
    compiled = Rewritten(module)
    gradients(compiled, module, [hidden()])
    (outcome,) = compiled.outcomes
    assert outcome.reason.startswith("expected attention without dropout, found dropout_p=0.5")
