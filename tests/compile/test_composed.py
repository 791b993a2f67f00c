"""A layer whose heads each map the latent twice: prompts, steps, training, and a soft cap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.steps import prompts_and_steps
from tests.training import assert_every_gradient

HIDDEN, N, P, R, V, L = 48, 4, 16, 8, 12, 20
Cache = tuple[Tensor, Tensor]


class TwoMaps(nn.Module):
    """Heads have two layers each for their keys, and two for their values; the latent and a rope key are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.down = nn.Linear(HIDDEN, N * (P + R), bias=False), nn.Linear(HIDDEN, L + R, bias=False)
        self.to_keys, self.to_values = (
            nn.ModuleList(nn.Sequential(nn.Linear(L, width), nn.Linear(width, width)) for _ in range(N))
            for width in (P, V)
        )

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, Cache]:
        q = self.q_proj(x).unflatten(-1, (N, -1)).transpose(1, 2)
        latent, k_rope = self.down(x).split([L, R], -1)
        if past:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope], 1)
        k, v = (torch.stack([head(latent) for head in heads], 1) for heads in (self.to_keys, self.to_values))
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        return self.attend(q, k, v).transpose(1, 2).flatten(2), (latent, k_rope)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, seen)


class Capped(TwoMaps):
    """Scores under a soft cap."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (3 * (q @ k.mT / 9).tanh()).softmax(-1) @ v


def empty(dtype: torch.dtype) -> Cache:
    return torch.zeros(2, 0, L, dtype=dtype), torch.zeros(2, 0, R, dtype=dtype)


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [TwoMaps, Capped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, kind: type[TwoMaps]) -> None:
    torch.manual_seed(0)
    sites = prompts_and_steps(kind().to(dtype), empty(dtype), HIDDEN)
    taken = [(site.path, site.shapes["L"]) for site in sites]
    assert taken == [("chunked", str(L)), ("absorbed", str(L)), ("chunked", str(L))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [TwoMaps, Capped])
def test_gradients_go_to_both_maps(kind: type[TwoMaps], autocast: bool) -> None:
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(), [torch.randn(2, 40, HIDDEN)], autocast=autocast)
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]
