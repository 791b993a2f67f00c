"""A layer whose heads each map the latent twice: prompts, steps, training, and a soft cap."""

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


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kind", [TwoMaps, Capped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, kind: type[TwoMaps]) -> None:
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
            taken += [
                (site.path, site.shapes["L"]) for report in mla_compile.reports()[before:] for site in report.sites
            ]
            past = after
    assert taken == [("chunked", str(L)), ("absorbed", str(L)), ("chunked", str(L))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [TwoMaps, Capped])
def test_gradients_go_to_both_maps(kind: type[TwoMaps], autocast: bool) -> None:
    torch.manual_seed(0)
    rewritten = assert_every_gradient(kind(), [torch.randn(2, 40, HIDDEN)], autocast=autocast)
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]
