"""A layer whose positions are added to some columns of the keys: prompts, steps and training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager
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


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [Added, Between])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, kind: type[Added]) -> None:
    torch.manual_seed(0)
    layer = kind().to(dtype)
    exact, compiled = copy.deepcopy(layer).double(), torch.compile(layer, backend="mla")
    past, taken = (torch.zeros(2, 0, L, dtype=dtype), torch.zeros(2, 0, R, dtype=dtype)), []
    with torch.no_grad():
        for count in (30, 1, 1, 1, 60):
            x, before = torch.randn(2, count, HIDDEN, dtype=dtype), len(mla_compile.reports())
            o, after = compiled(x, *past)
            expected, _ = exact(x.double(), *(t.double() for t in past))
            assert_as_close_as_eager(o, layer(x, *past)[0], expected, factor=4.0)  # sums in another order
            taken += [site.path for report in mla_compile.reports()[before:] for site in report.sites]
            past = after
    assert {"absorbed"} <= {*taken} <= {"absorbed", "chunked"}  # by the widths of the keys and the latent


@pytest.mark.parametrize("kind", [Added, Between])
def test_gradients_go_to_every_part(kind: type[Added]) -> None:
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(), [torch.randn(2, 40, HIDDEN)])
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]
