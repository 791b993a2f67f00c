"""Kimi K3's attention: key columns that heads share have no rope, a gate follows the attention, heads are no power
of two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.steps import prompts_and_steps

HIDDEN, N, P, SHARED, V, L, QUERY_RANK = 48, 6, 16, 8, 12, 20, 24


class GatedLayer(nn.Module):
    """Naive MLA that caches a latent and the shared key columns, and multiplies its output by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_up = nn.Linear(HIDDEN, QUERY_RANK), nn.Linear(QUERY_RANK, N * (P + SHARED), bias=False)
        self.kv_down, self.kv_up = nn.Linear(HIDDEN, L + SHARED, bias=False), nn.Linear(L, N * (P + V), bias=False)
        self.q_norm, self.kv_norm = nn.RMSNorm(QUERY_RANK), nn.RMSNorm(L)
        self.gate, self.out = nn.Linear(HIDDEN, N * V, bias=False), nn.Linear(N * V, HIDDEN, bias=False)

    def forward(self, x: Tensor, latents: Tensor, shared: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (N, -1)).transpose(1, 2)
        latent, column = self.kv_down(x).split([L, SHARED], -1)
        latents, shared = torch.cat([latents, self.kv_norm(latent)], 1), torch.cat([shared, column[:, None]], 2)
        k, v = self.kv_up(latents).unflatten(-1, (N, -1)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k, shared.expand(-1, N, -1, -1)], -1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        o = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return self.out(o * self.gate(x).sigmoid()), (latents, shared)


def test_prompts_and_steps_of_any_length(without_codegen: None) -> None:
    torch.manual_seed(0)
    sites = prompts_and_steps(GatedLayer(), (torch.zeros(2, 0, L), torch.zeros(2, 1, 0, SHARED)), HIDDEN)
    assert [site.path for site in sites] == ["chunked", "absorbed", "chunked"]
    assert {site.shapes["R"] for site in sites} == {str(SHARED)}
