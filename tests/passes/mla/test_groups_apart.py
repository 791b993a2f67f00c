"""Groups of heads in each of which keys have one latent and values another: an attention per group, as in low-rank
caches of models that were not trained with MLA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.checks import compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.mla.test_groups import (
    HEADS,
    G,
    apart,
    expanded,
    gate_of_a_group,
    gated,
    joined,
    of_its_own,
    slopes,
    softmax,
    tensors,
    to_heads,
)
from tests.passes.spellings import SQ, L, P, T, sealed

Project = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]


def attention(
    project: Project,
    of_keys: Change,
    of_values: Change,
    attend: Callable[..., Tensor] = sealed,
    project_values: Project | None = None,
) -> Callable[..., Tensor]:
    """Keys are up-projected from `of_keys(latents)`, values from `of_values(latents)`."""

    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k = torch.cat([project(of_keys(latents), w_uk), to_heads(k_rope)], -1)
        return attend(q, k, (project_values or project)(of_values(latents), w_uv))

    return function


def with_biases(latents: Tensor, weight: Tensor) -> Tensor:
    """A `Linear` with a bias for each group, joined before heads are told apart."""
    pairs = zip(latents.unbind(2), weight.chunk(G), strict=True)
    columns = torch.cat([F.linear(c, w.flatten(0, 1), w.flatten(0, 1)[:, 0]) for c, w in pairs], -1)
    return columns.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def of_one_latent(latents: Tensor, weight: Tensor) -> Tensor:
    """All heads share the first group's latent."""
    return torch.einsum("btl,ndl->bntd", latents[:, :, 0], weight)


def narrower(latents: Tensor, weight: Tensor) -> Tensor:
    """Groups whose latents are not equally wide."""
    parts = zip(latents.unbind(2), weight.chunk(G), range(L, L - G, -1), strict=True)
    return torch.cat([torch.einsum("btl,ndl->bntd", c[..., :n], w[..., :n]) for c, w, n in parts], 1)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(T) > torch.arange(SQ)[:, None] + T - SQ, -torch.inf)


APART = {
    "einsum": attention(expanded, torch.sin, torch.cos),
    "joined": attention(joined, torch.sin, torch.cos),
    "biases": attention(with_biases, torch.sin, torch.cos),
    "a mask": attention(joined, torch.sin, torch.cos, softmax(causal)),
    "a bias a head and a mask": attention(joined, torch.sin, torch.cos, softmax(slopes)),
    "unequal widths": attention(narrower, torch.sin, torch.cos),
    "tensors of another group": of_its_own(1, 0, 2),
    "keys of another group": attention(expanded, lambda c: c.flip(2), lambda c: c),
    "values of another group, joined": attention(joined, lambda c: c, lambda c: c.roll(1, 2)),
    "keys of a latent for all heads": attention(of_one_latent, torch.sin, torch.cos, project_values=joined),
    "values of a latent for all heads": attention(joined, torch.sin, torch.cos, project_values=of_one_latent),
    "a gate of the keys alone": gated(expanded, gate_of_a_group, lambda c: c.new_ones(())),
    "another group's gate": gated(apart, gate_of_a_group, lambda c: gate_of_a_group(c.flip(2))),
    "without rope": lambda q, c, _, w_uk, w_uv: sealed(q[..., :P], joined(c.sin(), w_uk), joined(c.cos(), w_uv)),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_each_group_attends_to_both_of_its_latents(function: Callable[..., Tensor]) -> None:
    for path, module, outcomes in compiled(function, tensors()):
        assert [outcome.path for outcome in outcomes] == [path], outcomes[0].reason
        assert "a latent for each of 3 groups of heads" in outcomes[0].reason
        assert outcomes[0].shapes["Lk"]
        assert sum("_attention.default" in str(node.target) for node in module.graph.nodes) == G
        absorbed = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        expanded = [n for n in absorbed if n.meta["val"].shape[-3:-1] in ((HEADS, T), (T, HEADS))]
        assert path != "absorbed" or not expanded


def of_two_latents(latents: Tensor, weight: Tensor) -> Tensor:
    """Each group's keys are columns that come from two latents of its own."""
    half = weight.shape[1] // 2
    return torch.cat([joined(latents.sin(), weight[:, :half]), joined(latents.exp(), weight[:, half:])], -1)


def test_keys_of_two_latents_in_each_group_stay_as_they_are_for_many_queries() -> None:
    function = attention(of_two_latents, lambda c: c, torch.cos, project_values=joined)
    (outcome,) = rewrite(capture(function, *tensors()), "chunked")
    assert outcome.path == "unchanged"


def turned(k: Tensor) -> Tensor:
    """A rope on whole keys."""
    angle = torch.arange(T)[:, None] / torch.arange(1.0, k.shape[-1] // 2 + 1).double()
    first, second = k.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def changed(change: Change) -> Callable[..., Tensor]:
    """Keys, without rope columns, are changed after their up-projection."""
    return lambda q, c, _, w_uk, w_uv: sealed(
        q[..., : P // 2 * 2], change(joined(c.sin(), w_uk[:, : P // 2 * 2])), joined(c.cos(), w_uv)
    )


REFUSED = {
    "a rope on keys of each head": changed(turned),
    "a norm of keys of each head": changed(lambda k: F.rms_norm(k, k.shape[-1:])),
    "a soft cap": attention(joined, torch.sin, torch.cos, softmax(torch.tanh)),
    "values that are not linear": attention(
        joined, torch.sin, torch.cos, project_values=lambda c, w: joined(c, w).tanh()
    ),
    "rope keys of each head": lambda q, c, k_rope, w_uk, w_uv: sealed(
        q,
        torch.cat([joined(c.sin(), w_uk), (to_heads(k_rope) + w_uk[:, None, :1, 0]).sin()], -1),
        joined(c.cos(), w_uv),
    ),
}


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_a_near_miss_stays_as_it_is(function: Callable[..., Tensor], path: str) -> None:
    (outcome,) = rewrite(capture(function, *tensors()), path)
    assert outcome.path == "unchanged"
