"""A layer that caches a latent for keys and one for values: prompts are chunked, steps attend to both latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.compile.steps import prompts_and_steps
from tests.training import assert_gradients_of

HIDDEN, N, P, R, V, KEYS, VALUES = 48, 8, 16, 8, 12, 28, 20
Cache = tuple[Tensor, Tensor, Tensor]


def as_they_are(scores: Tensor) -> Tensor:
    return scores


def capped(scores: Tensor) -> Tensor:
    return 5 * (scores / 5).tanh()


class TwoLatents(nn.Module):
    """One latent for keys and one for values, each from a projection of its own, and a rope key."""

    def __init__(self, of_scores: Callable[[Tensor], Tensor] = as_they_are) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.down = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in (KEYS, VALUES, R))
        self.up = nn.ModuleList([nn.Linear(KEYS, N * P), nn.Linear(VALUES, N * V, bias=False)])
        self.of_scores = of_scores

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, Cache]:
        of_keys, of_values, k_rope = (torch.cat([old, down(x)], 1) for old, down in zip(past, self.down, strict=True))
        projected = self.q_proj(x), self.up[0](of_keys), self.up[1](of_values)
        q, k, v = (t.unflatten(-1, (N, -1)).transpose(1, 2) for t in projected)
        k = torch.cat([k, k_rope.sin()[:, None].expand(-1, N, -1, -1)], -1)
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        scores = self.of_scores(q @ k.mT * (P + R) ** -0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), (of_keys, of_values, k_rope)


class SharedKeys(nn.Module):
    """Keys are one latent that all heads share, W_UK is with the queries, and values have a latent of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * P, bias=False)
        self.w_uk = nn.Parameter(torch.randn(N, P, KEYS) / P**0.5)
        self.down = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in (KEYS, VALUES))
        self.up = nn.Linear(VALUES, N * V, bias=False)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        of_keys, of_values = (torch.cat([old, down(x)], 1) for old, down in zip(past, self.down, strict=False))
        q = torch.einsum("bsnp,npl->bnsl", self.q_proj(x).unflatten(-1, (N, P)), self.w_uk)
        v = self.up(of_values).unflatten(-1, (N, V)).transpose(1, 2)
        seen = torch.ones(x.shape[1], v.shape[2], dtype=torch.bool).tril(v.shape[2] - x.shape[1])
        scores = (q @ of_keys[:, None].mT * P**-0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), (of_keys, of_values)


def empty(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, 0, width, dtype=dtype) for width in (KEYS, VALUES, R))


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("of_scores", [as_they_are, pytest.param(capped, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, of_scores: Callable[[Tensor], Tensor]) -> None:
    shapes = check_prompts_and_steps(lambda: TwoLatents(of_scores), dtype)
    assert [shapes[name] for name in ("L", "Lk", "P", "R")] == list(map(str, (VALUES, KEYS, P, R)))


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_prompts_and_steps_whose_keys_heads_share(dtype: torch.dtype) -> None:
    shapes = check_prompts_and_steps(SharedKeys, dtype)
    assert [shapes[name] for name in ("L", "P", "R")] == list(map(str, (VALUES, 0, KEYS)))


def check_prompts_and_steps(make: Callable[[], nn.Module], dtype: torch.dtype) -> Mapping[str, str]:
    """Returns the shapes of the last site."""
    torch.manual_seed(0)
    sites = prompts_and_steps(make().to(dtype), empty(dtype), HIDDEN)
    assert [site.path for site in sites] == ["chunked", "absorbed", "chunked"]
    shapes = sites[-1].shapes
    assert shapes["T"].count("s") == 2  # the lengths of all caches are one symbol
    return shapes


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("of_scores", [as_they_are, capped])
def test_a_prompt_is_trained(of_scores: Callable[[Tensor], Tensor]) -> None:
    check_training(lambda: TwoLatents(of_scores))


@pytest.mark.usefixtures("without_codegen")
def test_a_prompt_whose_keys_heads_share_is_trained() -> None:
    check_training(SharedKeys)


def check_training(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(2, 30, HIDDEN)
    assert_gradients_of(torch.compile(layer, backend="mla"), layer, [x, *empty()])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]
