"""A model whose second layer adds the values of the first layer to its own: prompts, steps and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.steps import prompts_and_steps
from tests.training import assert_every_gradient

HIDDEN, N, P, R, V, L = 48, 4, 16, 8, 12, 20


class Layer(nn.Module):
    """Naive MLA that caches a latent and a rope key, and returns its values for the layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.down = nn.Linear(HIDDEN, N * (P + R), bias=False), nn.Linear(HIDDEN, L + R, bias=False)
        self.to_keys, self.to_values = nn.Linear(L, N * P, bias=False), nn.Linear(L, N * V)
        self.o_proj, self.share = nn.Linear(N * V, HIDDEN, bias=False), nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor, past: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        past = torch.cat([past, self.down(x)], 1)
        latent, k_rope = past.split([L, R], -1)
        q, k, v = (
            t.unflatten(-1, (N, -1)).transpose(1, 2)
            for t in (self.q_proj(x), self.to_keys(latent), self.to_values(latent))
        )
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        v = v if first is None else (1 - self.share) * v + self.share * first
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        o = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return x + self.o_proj(o), past, v


class Model(nn.Module):
    """Three layers, of which the second and the third add the values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, *pasts: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, caches = None, []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, cache, values = layer(x, past, first)
            first = values if first is None else first
            caches.append(cache)
        return x, tuple(caches)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("without_codegen")
def test_prompts_and_steps_at_any_length(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    empty = tuple(torch.zeros(2, 0, L + R, dtype=dtype) for _ in range(3))
    sites = prompts_and_steps(Model().to(dtype), empty, HIDDEN)
    taken = [(site.path, site.shapes["L"]) for site in sites]
    assert taken == [(path, str(width)) for path in ("chunked", "absorbed", "chunked") for width in (L, 2 * L, 2 * L)]


def test_gradients_go_to_both_latents() -> None:
    torch.manual_seed(0)
    rewritten = assert_every_gradient(Model(), [torch.randn(2, 40, HIDDEN), *(torch.zeros(2, 0, L + R),) * 3])
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"] * 3
