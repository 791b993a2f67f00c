"""A rope key for each head.

Few queries attend to the latent, and what these keys add to the scores is a bias. Many get them beside their keys.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, L, N, P, R, T, V
from tests.training import assert_every_gradient


def of_each_head(k_rope: Tensor) -> Tensor:
    """Rope keys `[B, N, T, R]` that differ between heads, from `[B, T, R]`."""
    return (mla.to_heads(k_rope) * torch.arange(1, N + 1)[:, None, None]).sin()


def keys(latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys, each with a rope key of its own, and values."""
    k_nope, v = mla.up_projected(latent, w_kv)
    return torch.cat([k_nope, of_each_head(k_rope)], -1), v


def by_hand(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    return mla.softmax(mla.queries(x, w_q), *keys(latent, k_rope, w_kv))


def causal(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    return mla.sealed(mla.queries(x, w_q), *keys(latent, k_rope, w_kv), causal=True)


def two_scores(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Scores of the rope keys have their own scale; a low number replaces all scores of one sequence's last keys."""
    k_nope, v = mla.up_projected(latent, w_kv)
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    scores = q_nope @ k_nope.mT * SCALE + q_rope @ of_each_head(k_rope).mT * 0.3
    hidden = torch.arange(T) > torch.tensor([T, 4])[:B, None, None, None]
    return scores.masked_fill(hidden, -1e9).softmax(-1) @ v


def keys_are_latents(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Queries are absorbed by hand."""
    w_uk, _ = mla.weights(w_kv)
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    scores = torch.einsum("bnsp,npl->bnsl", q_nope, w_uk) @ latent[:, None].mT + q_rope @ of_each_head(k_rope).mT
    return (scores * SCALE).softmax(-1) @ mla.up_projected(latent, w_kv)[1]


def two_latents(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys and values have a latent each."""
    w_uk, w_uv = mla.weights(w_kv)
    k = torch.einsum("btl,npl->bntp", latent.sin(), w_uk) + w_uk[:, None, :, 0]
    v = torch.einsum("btl,nvl->bntv", latent, w_uv)
    scores = mla.queries(x, w_q) @ torch.cat([k, of_each_head(k_rope)], -1).mT * SCALE
    return scores.masked_fill(torch.ones(SQ, T, dtype=torch.bool).triu(T - SQ + 1), -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("function", [by_hand, causal, two_scores, keys_are_latents, two_latents])
def test_few_queries_attend_to_the_latent(function: Function) -> None:
    module = capture(function, *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed"
    masks = dict.fromkeys((causal, two_latents), "causal + own ropes")
    masks[two_scores] = "own ropes + tensor"
    assert outcome.mask == masks.get(function, "own ropes")
    check_right(before, run(module, *mla.tensors()))
    assert not [node for node in module.graph.nodes if _is_of(node, [B, N, T, V])], "values of all heads"


def test_sequences_that_share_a_latent_may_have_rope_keys_of_their_own() -> None:
    """Without one in the latent, nothing tells an axis of sequences from one of queries: what they add is a bias."""

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        k_nope, v = (part[0] for part in mla.up_projected(latent[:1], w_kv))
        scores = q_nope @ k_nope.mT + q_rope @ of_each_head(k_rope).mT
        return (scores * SCALE).softmax(-1) @ v

    for path in ("absorbed", "chunked"):
        module = capture(function, *mla.tensors())
        before = run(module, *mla.tensors())
        (outcome,) = rewrite(module, path)
        check_right(before, run(module, *mla.tensors()))
        assert (outcome.path, outcome.mask) == (path, "keys of queries")


def _is_of(node: torch.fx.Node, shape: list[int]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and [*value.shape] == shape


EXPANDED = [by_hand, causal, two_scores, two_latents]


@pytest.mark.parametrize("function", EXPANDED)
def test_many_queries_get_them_beside_their_keys(function: Function) -> None:
    module = capture(function, *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, "chunked")
    assert outcome.path == "chunked"
    assert outcome.mask == {by_hand: "none", two_scores: "lengths"}.get(function, "causal")
    check_right(before, run(module, *mla.tensors()))
    (op,) = (node for node in module.graph.nodes if node.target is torch.ops.mla.expanded_attention.default)
    assert op.args[2].meta["val"].shape == (B, T, N, R)
    biased = [
        node for node in module.graph.nodes if _is_of(node, [B, N, SQ, T]) and node.meta["val"].is_floating_point()
    ]
    assert not biased, "scores of all heads"


@pytest.mark.parametrize("function", [by_hand, two_scores, two_latents])
def test_they_are_trained(function: Function) -> None:
    class Module(nn.Module):
        forward = staticmethod(function)

    trained = assert_every_gradient(Module(), [*mla.tensors()])
    assert [outcome.path for outcome in trained.outcomes] == ["chunked"]


def under_a_soft_cap(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    k, v = keys(latent, k_rope, w_kv)
    return (mla.queries(x, w_q) @ k.mT).tanh().softmax(-1) @ v


def weights_returned(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor]:
    k, v = keys(latent, k_rope, w_kv)
    weights = (mla.queries(x, w_q) @ k.mT).softmax(-1)
    return weights @ v, weights


@pytest.mark.parametrize(
    ("function", "obstacle", "remedy"),
    [
        (under_a_soft_cap, "a function of the scores", "compute one rope key per token"),
        (weights_returned, "attention weights that are used again", "do not return or use them"),
    ],
)
def test_where_nothing_can_be_added_to_scores_they_stay(function: Function, obstacle: str, remedy: str) -> None:
    (outcome,) = rewrite(capture(function, *mla.tensors()), "absorbed")
    assert outcome.path == "unchanged"
    assert f"expected {R} columns of the keys to be shared by all heads" in outcome.reason
    assert outcome.reason.partition(" beside ")[2].startswith(obstacle)
    assert outcome.remedy.startswith(remedy)


class HalfAbsorbed(nn.Module):
    """Keys are the latent, beside one rope key per head."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uk, self.w_uv = (nn.Parameter(torch.randn(N, width, L)) for width in (P, V))

    def forward(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        q_latent = torch.einsum("bnsp,npl->bnsl", q, self.w_uk)
        scores = (q_latent @ latent[:, None].mT + q_rope @ k_rope.mT) * SCALE
        return scores.softmax(-1) @ torch.einsum("btl,nvl->bntv", latent, self.w_uv)


def test_absorbed_by_hand_they_are_trained() -> None:
    torch.manual_seed(0)
    shapes = (B, N, SQ, P), (B, N, SQ, R), (B, T, L), (B, N, T, R)
    trained = assert_every_gradient(HalfAbsorbed(), [torch.randn(shape) for shape in shapes])
    assert [outcome.path for outcome in trained.outcomes] == ["absorbed"]


def test_given_for_all_heads_they_are_trained() -> None:
    class Expanded(HalfAbsorbed):
        def forward(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            k, v = (torch.einsum("btl,nvl->bntv", latent, weight) for weight in (self.w_uk, self.w_uv))
            return F.scaled_dot_product_attention(torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1), v)

    torch.manual_seed(0)
    shapes = (B, N, SQ, P), (B, N, SQ, R), (B, T, L), (B, N, T, R)
    trained = assert_every_gradient(Expanded(), [torch.randn(shape) for shape in shapes])
    assert [outcome.path for outcome in trained.outcomes] == ["chunked"]
