"""A layer whose positions are added to some columns of the keys: prompts, steps and training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.steps import prompts_and_steps
from tests.training import assert_every_gradient

HIDDEN, N, P, R, V, L = 48, 4, 16, 8, 12, 20
Cache = tuple[Tensor, Tensor]


class Added(nn.Module):
    """The positional key `[B, T, R]` is added to the first columns of all heads' keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.down = nn.Linear(HIDDEN, N * P, bias=False), nn.Linear(HIDDEN, L + R, bias=False)
        self.up = nn.Linear(L, N * (P + V), bias=False)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, Cache]:
        q = self.q_proj(x).unflatten(-1, (N, -1)).transpose(1, 2)
        latent, k_rope = self.down(x).split([L, R], -1)
        if past:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope.sin()], 1)
        k, v = self.up(latent).unflatten(-1, (N, -1)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k[..., :R] + k_rope[:, None], k[..., R:]], -1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2), (latent, k_rope)


class Between(Added):
    """Rope columns stand between two up-projections of a weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * (2 * P + R), bias=False)
        self.more = nn.Linear(L, N * P, bias=False)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, Cache]:
        q = self.q_proj(x).unflatten(-1, (N, -1)).transpose(1, 2)
        latent, k_rope = self.down(x).split([L, R], -1)
        if past:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope], 1)
        k, v = self.up(latent).unflatten(-1, (N, -1)).transpose(1, 2).split([P, V], -1)
        more = self.more(latent).unflatten(-1, (N, -1)).transpose(1, 2)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1), more], -1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2), (latent, k_rope)


def empty(dtype: torch.dtype) -> Cache:
    return torch.zeros(2, 0, L, dtype=dtype), torch.zeros(2, 0, R, dtype=dtype)


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [Added, Between])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, kind: type[Added]) -> None:
    torch.manual_seed(0)
    taken = {site.path for site in prompts_and_steps(kind().to(dtype), empty(dtype), HIDDEN)}
    assert {"absorbed"} <= taken <= {"absorbed", "chunked"}  # by the widths of the keys and the latent


@pytest.mark.parametrize("kind", [Added, Between])
def test_gradients_go_to_every_part(kind: type[Added]) -> None:
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(), [torch.randn(2, 40, HIDDEN)])
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]
