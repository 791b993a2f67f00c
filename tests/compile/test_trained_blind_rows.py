"""Gradients of queries that see no key, under masks of a finite number, which is added to scores or replaces them."""

from __future__ import annotations

import pytest
import torch

from tests.compile.layers import Layer, expanded_attention, hidden
from tests.compile.test_trained_absorbed import Absorbed
from tests.training import Rewritten, assert_every_gradient

TOKENS = 13
LEAST = torch.finfo(torch.float32).min


class ByHand(Layer):
    """Hidden scores are replaced by `fill`. The first two tokens see no key."""

    fill = -1e4

    def attend(self, q, k, v):
        return self.weights(q @ k.mT * q.shape[-1] ** -0.5) @ v

    def hidden(self, scores):
        return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(-1)

    def weights(self, scores):
        return scores.masked_fill(self.hidden(scores), self.fill).softmax(-1)


class Padded(ByHand):
    """Left padding, which is all of the first sequence."""

    def __init__(self, **settings):
        super().__init__(**settings)
        seen = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
        seen[0], seen[1, ..., :4] = False, False
        self.register_buffer("seen", seen)

    def hidden(self, scores):
        return ~(self.seen & torch.ones(scores.shape[-2:], dtype=torch.bool).tril())


class TwoMasks(Padded):
    """Two masks replace scores, by different numbers."""

    def weights(self, scores):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -1e30).masked_fill(~self.seen, LEAST).softmax(-1)


class Chosen(Padded):
    def weights(self, scores):
        return torch.where(self.hidden(scores), self.fill, scores).softmax(-1)


class Added(Padded):
    """The mask is added. Gradients go through a sum, however low it is."""

    def weights(self, scores):
        return (scores + torch.zeros(()).masked_fill(self.hidden(scores), LEAST)).softmax(-1)


class Capped(Padded):
    def weights(self, scores):
        return super().weights(3 * torch.tanh(scores / 3))


class Both(Padded):
    """One mask is added, and another replaces scores by the same number. Of a query that sees no key, only scores that
    were not replaced have gradients."""

    def weights(self, scores):
        padding = torch.zeros(()).masked_fill(~self.seen, LEAST)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores + padding).masked_fill(later, LEAST).softmax(-1)


class AbsorbedByHand(Absorbed):
    """Absorbed by hand: no up-projection tells heads apart."""

    def scores(self, q, k):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-2)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -1e9)


@pytest.mark.parametrize("fill", [-1e4, -1e9, LEAST])
@pytest.mark.parametrize("kind", [ByHand, Padded])
def test_a_number_in_the_place_of_scores_takes_their_gradients(kind, fill):
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(fill=fill), [hidden()])
    assert len(rewritten.nodes(expanded_attention)) == 1


@pytest.mark.parametrize("kind", [TwoMasks, Chosen, Added, Capped, AbsorbedByHand])
def test_other_spellings(kind):
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(), [hidden()])
    assert all(outcome.rewritten for outcome in rewritten.outcomes)


def test_queries_that_see_no_key_have_gradients_of_zero():
    """Exactly zero, as in eager, and not nearly."""
    module = Padded(fill=LEAST)
    with torch.enable_grad():
        x = hidden().requires_grad_()
        output = Rewritten(module)(x)
        (found,) = torch.autograd.grad(output[0].square().sum(), module.mla.q_proj.weight)
    assert not found.any()


def test_a_mask_that_is_added_beside_one_that_replaces_scores_is_refused():
    torch.manual_seed(0)
    rewritten = assert_every_gradient(Both(), [hidden()])
    (outcome,) = rewritten.outcomes
    assert outcome.reason.startswith("expected masks that either replace scores by a finite number or add to them")


def test_a_mask_that_is_added_beside_one_of_minus_infinity_is_rewritten():
    """A near miss of `Both`: scores that are replaced by minus infinity have no weight in any row."""

    class Infinite(Both):
        def weights(self, scores):
            padding = torch.zeros(()).masked_fill(~self.seen, LEAST)
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return (scores + padding).masked_fill(later, -torch.inf).softmax(-1)

    torch.manual_seed(0)
    rewritten = assert_every_gradient(Infinite(), [hidden()])
    assert len(rewritten.nodes(expanded_attention)) == 1
