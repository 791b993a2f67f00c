"""Tensors that are written in place, in graphs that need gradients: what is read has its value where it is read."""

from __future__ import annotations

import pytest
import torch

import mla_compile
from tests.compile.layers import ByHand, Layer, OneByOne, assert_trained, hidden
from tests.compile.test_training import Frozen
from tests.models import P


class Written(Layer):
    """Keys are written into a buffer."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        buffer = torch.empty_like(k)
        buffer[..., :P].copy_(k)
        return buffer, v


def test_keys_that_are_written_into_a_buffer():
    assert_trained(Written(), hidden(), rewritten=1)


class InPlace(ByHand):
    """Divides the output in place."""

    def attend(self, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        o = weights @ v
        o /= weights.sum(-1, keepdim=True)
        return o


@pytest.mark.parametrize("layer", [InPlace, OneByOne])
def test_a_result_that_is_written_in_pieces_or_over(layer):
    assert_trained(layer(), hidden(), rewritten=1)


class FrozenWithOut(Frozen):
    """The shares of a softmax by hand are taken of its result, whose memory is given as `out`."""

    def attend(self, q, k, v):
        if torch.is_grad_enabled():
            return super().attend(q, k, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        o = weights @ v
        torch.div(o.clone(), weights.sum(-1, keepdim=True), out=o)
        return o


def test_a_result_that_is_written_over_as_out():
    assert_trained(FrozenWithOut(), hidden(), rewritten=2, outcomes=2)


class QueriesInParts(Layer):
    """Queries are written in parts into an empty tensor, each into a slice of all dimensions."""

    def attend(self, q, k, v):
        buffer = q.new_empty(*q.shape)
        buffer[:, :, :, :P] = q[..., :P]
        buffer[:, :, :, P:] = q[..., P:]
        return super().attend(buffer, k, v)


@pytest.mark.usefixtures("without_codegen")
def test_queries_that_are_written_in_parts_with_sizes_that_are_symbols():
    module = QueriesInParts()
    compiled = torch.compile(module, backend="mla")
    for tokens in (7, 12):
        x = hidden(tokens=tokens)
        with torch.enable_grad():
            found = torch.autograd.grad(compiled(x).square().mean(), list(module.parameters()))
            expected = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
        for ours, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, eager)
    assert mla_compile.last_report().rewritten == 1


class LatentAgain(Layer):
    """After an attention without gradients, its latent is overwritten, and what it was made of becomes its value."""

    def forward(self, x):
        with torch.no_grad():
            attended = super().forward(x)
            self.latent.zero_()
            made_of = self.made_of.sin_()
        return attended + made_of.sum() + super().forward(x + 1)

    def latents(self, x):
        latent, k_rope = super().latents(x)
        self.made_of, self.latent = latent, latent.sin()
        return self.latent, k_rope


def test_a_latent_whose_value_another_tensor_has_later():
    compiled = assert_trained(LatentAgain(), hidden(), rewritten=1, outcomes=2)
    assert compiled.outcomes[0].reason.startswith("expected operands that are computed before the attention")


class ActivatedThrice(Layer):
    """The latent is activated for keys, for values, and after the attention in place."""

    def forward(self, x):
        return super().forward(x) + self.made_of.relu_().mean()

    def latents(self, x):
        latent, k_rope = super().latents(x)
        self.made_of = latent * 2
        return self.made_of, k_rope

    def up_projected(self, latent):
        (k, _), (_, v) = (super(ActivatedThrice, self).up_projected(latent.relu()) for _ in range(2))
        return k, v


def test_a_latent_whose_value_another_tensor_has_before_and_after_the_attention():
    assert_trained(ActivatedThrice(), hidden(), rewritten=1)
