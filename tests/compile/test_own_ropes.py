"""A layer that caches a latent and rope keys of each head: prompts are chunked, steps attend to the latent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.compile.steps import prompts_and_steps
from tests.training import assert_gradients_of

HIDDEN, N, P, R, V, L = 48, 4, 16, 8, 12, 20
Cache = tuple[Tensor, Tensor]


class OwnRopes(nn.Module):
    """Rope keys `[B, T, N, R]` are projected from the hidden states, as queries are."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.k_rope_proj = nn.Linear(HIDDEN, N * R, bias=False)
        self.down, self.up = nn.Linear(HIDDEN, L, bias=False), nn.Linear(L, N * (P + V), bias=False)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, Cache]:
        q = self.q_proj(x).unflatten(-1, (N, -1)).transpose(1, 2)
        latent = torch.cat([past[0], self.down(x)], 1)
        k_rope = torch.cat([past[1], self.k_rope_proj(x).unflatten(-1, (N, -1)).sin()], 1)
        k_nope, v = self.up(latent).unflatten(-1, (N, -1)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k_nope, k_rope.transpose(1, 2)], -1)
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2), (latent, k_rope)


def empty(dtype: torch.dtype = torch.float32) -> Cache:
    return torch.zeros(2, 0, L, dtype=dtype), torch.zeros(2, 0, N, R, dtype=dtype)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sites = prompts_and_steps(OwnRopes().to(dtype), empty(dtype), HIDDEN)
    taken = [(site.path, site.mask) for site in sites]
    assert taken == [("chunked", "causal"), ("absorbed", "own ropes"), ("chunked", "causal")]


@pytest.mark.usefixtures("without_codegen")
def test_a_prompt_is_trained() -> None:
    torch.manual_seed(0)
    layer, x = OwnRopes(), torch.randn(2, 30, HIDDEN)
    assert_gradients_of(torch.compile(layer, backend="mla"), layer, [x, *empty()])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]
