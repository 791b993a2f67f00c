"""Tensors that are written in place, in graphs that need gradients: what is read has its value where it is read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from tests.compile.layers import ByHand, Layer, OneByOne, assert_trained, hidden
from tests.compile.test_training import Frozen
from tests.models import P
from tests.training import assert_every_gradient


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


class Zeroed(Layer):
    """Numbers are assigned to a column of the keys, a row of the result, and a column of it."""

    def attend(self, q, k, v):
        k[..., 0] = 0
        o = super().attend(q, k, v)
        o[:, :, 0] = 0.5
        o[..., 1] = torch.tensor(2.0)
        return o


def test_numbers_that_are_assigned():
    assert_trained(Zeroed(), hidden(), rewritten=1)


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


WRITES = {
    "silu": lambda o: F.silu(o, inplace=True),
    "a module": lambda o: nn.SiLU(inplace=True)(o),
    "silu of a view": lambda o: F.silu(o.transpose(1, 2), inplace=True),
    "leaky_relu": lambda o: F.leaky_relu(o, 0.1, True),
    "by its method": lambda o: o.__imul__(3.0),
    "clamp": lambda o: torch.clamp_(o, -0.3, 0.3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_result_that_is_written_over_once_more(write):
    """The code of the site has that write, and must not be followed by it."""

    class WrittenOver(Layer):
        def attend(self, q, k, v):
            o = super().attend(q, k, v)
            write(o)
            return o

    assert_trained(WrittenOver(), hidden(), rewritten=1)


class TowardsOnes(Layer):
    """What the result is overwritten with is made of it."""

    def attend(self, q, k, v):
        o = super().attend(q, k, v)
        return o.lerp_(torch.ones_like(o), 0.3)


def test_a_result_that_is_written_over_with_what_is_made_of_it():
    compiled = assert_every_gradient(TowardsOnes(), [hidden()])
    assert [outcome.rewritten for outcome in compiled.outcomes] == [True]


def silent_result(q, k, v, attend):
    o = attend(q, k, v)
    with torch.no_grad():
        o[:, :, -2:].zero_()
    return o


def silent_keys(q, k, v, attend):
    with torch.no_grad():
        k.mul_(2)
    return attend(q, k, v)


def silent_buffer(q, k, v, attend):
    buffer = torch.zeros_like(k)
    with torch.no_grad():
        buffer[..., :P] = k[..., :P]
    buffer[..., P:] = k[..., P:]
    return attend(q, buffer, v)


def silent_in_inference_mode(q, k, v, attend):
    with torch.inference_mode():
        q.mul_(2)
    return attend(q, k, v)


ONLY_LATER = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11 traces no inference_mode within"
)
SILENT = (silent_result, silent_keys, silent_buffer, pytest.param(silent_in_inference_mode, marks=ONLY_LATER))


@pytest.mark.parametrize("attention", SILENT, ids=lambda function: function.__name__)
def test_writes_that_gradients_do_not_see(attention):
    """Gradients pass them as if nothing had been written: those of the algebra would be others."""

    class Silent(Layer):
        def attend(self, q, k, v):
            return attention(q, k, v, super().attend)

    compiled = assert_trained(Silent(), hidden(), rewritten=0)
    assert compiled.outcomes[0].reason.startswith("expected writes that gradients see, found one without gradients")


class SilentAtFirst(Layer):
    """A result without gradients is written over with them."""

    def attend(self, q, k, v):
        with torch.no_grad():
            o = super().attend(q, k, v).clone()
        return o.mul_(v.mean())


def test_a_write_with_gradients_to_a_result_without():
    assert_trained(SilentAtFirst(), hidden(), rewritten=1)
