"""Tensors of an attention that are also written to, returned or checked elsewhere: all this still happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import DRAWS, assert_as_close_as_eager_on_average

B, T, N, L, P, R = 2, 40, 4, 16, 8, 4


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries `[B, N, 1, P + R]`, latents `[B, T, L]`, rope keys `[B, T, R]`, an up-projection `[N 2P, L]`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, N, 1, P + R), (B, T, L), (B, T, R), (2 * N * P, L)
    q, latent, k_rope, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, latent, k_rope, weight / L**0.5


def keys_and_values(latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k_nope, v = (latent @ weight.T).unflatten(2, (N, 2 * P)).transpose(1, 2).chunk(2, dim=-1)
    return torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1), v


def latent_changed_after(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The cache is scaled in place between the up-projection and the attention."""
    k, v = keys_and_values(latent, k_rope, weight)
    latent.mul_(3)
    return (F.scaled_dot_product_attention(q, k, v),)


def latent_changed_before(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    latent[:, 5:].mul_(3)
    k, v = keys_and_values(latent, k_rope, weight)
    return (F.scaled_dot_product_attention(q, k, v),)


def keys_returned(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    k, v = keys_and_values(latent, k_rope, weight)
    return F.scaled_dot_product_attention(q, k, v), k


def one_weight_for_both(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Values are the keys without rope."""
    k, _ = keys_and_values(latent, k_rope, weight)
    return (F.scaled_dot_product_attention(q, k, k[..., :P]),)


def weight_made_of_the_latent(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The up-projection depends on what it projects."""
    k, v = keys_and_values(latent, k_rope, weight * latent.mean((0, 1)))
    return (F.scaled_dot_product_attention(q, k, v),)


@pytest.mark.parametrize(
    "function",
    [latent_changed_after, latent_changed_before, keys_returned, one_weight_for_both, weight_made_of_the_latent],
)
def test_what_else_happens_still_happens(function: Callable[..., tuple[Tensor, ...]]) -> None:
    compiled = torch.compile(function, backend="mla", options={"mla.path": "absorbed"}, fullgraph=True)
    draws = []
    for seed in range(DRAWS):
        own, plain = inputs(torch.float32, seed), inputs(torch.float32, seed)
        draws.append((compiled(*own), function(*plain), function(*inputs(torch.float64, seed))))
        for mine, theirs in zip(own, plain, strict=True):
            assert torch.equal(mine, theirs)
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed"
    for results in zip(*(zip(*draw, strict=True) for draw in draws), strict=True):  # each result, of all draws
        assert_as_close_as_eager_on_average(*zip(*results, strict=True))


# Dynamo makes these calls of assert statements. They are written out because pytest rewrites the statements here.


def asserted_latent(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
    torch._assert_async(latent.isfinite().all(), "a latent that is no number")
    k, v = keys_and_values(latent, k_rope, weight)
    return F.scaled_dot_product_attention(q, k, v)


def asserted_keys(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
    k, v = keys_and_values(latent, k_rope, weight)
    torch._assert_async(k.isfinite().all(), "a key that is no number")
    return F.scaled_dot_product_attention(q, k, v)


def asserted_scores(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
    k, v = keys_and_values(latent, k_rope, weight)
    scores = q @ k.mT
    weights = scores.softmax(-1)
    torch._assert_async(scores.isfinite().all(), "a score that is no number")
    torch._assert_async((weights.sum(-1) > 0.9).all(), "weights that are none")
    return weights @ v


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("function", [asserted_latent, asserted_keys, asserted_scores])
def test_asserts_on_values_stay(function: Callable[..., Tensor]) -> None:
    compiled = torch.compile(function, backend="mla", options={"mla.path": "absorbed"}, fullgraph=True)
    draws = []
    for seed in range(DRAWS):
        own = inputs(torch.float32, seed)
        draws.append((compiled(*own), function(*own), function(*inputs(torch.float64, seed))))
    assert_as_close_as_eager_on_average(*zip(*draws, strict=True))
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed"
    own[1][0, 0] = torch.nan
    with pytest.raises((AssertionError, RuntimeError), match="that is no number"):
        compiled(*own)
