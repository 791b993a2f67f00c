"""A layer that caches a latent for keys and one for values: a prompt stays as it is, a step attends to both latents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager

HIDDEN, N, P, V, KEYS, VALUES = 48, 4, 16, 16, 12, 20


class TwoLatents(nn.Module):
    """One latent for keys and one for values, each from a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * P, bias=False)
        self.down = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in (KEYS, VALUES))
        self.up = nn.ModuleList([nn.Linear(KEYS, N * P, bias=False), nn.Linear(VALUES, N * V, bias=False)])

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        latents = tuple(torch.cat([old, down(x)], 1) for old, down in zip(past, self.down, strict=True))
        projected = self.q_proj(x), *(up(latent) for up, latent in zip(self.up, latents, strict=True))
        q, k, v = (t.unflatten(-1, (N, -1)).transpose(1, 2) for t in projected)
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2), latents


@pytest.mark.usefixtures("without_codegen")
def test_steps_after_a_prompt_attend_to_both_latents_at_any_length() -> None:
    torch.manual_seed(0)
    layer = TwoLatents()
    exact = TwoLatents().double()
    exact.load_state_dict({name: weight.double() for name, weight in layer.state_dict().items()})
    compiled = torch.compile(layer, backend="mla")
    paths = []
    with torch.no_grad():
        past = torch.randn(2, 30, KEYS), torch.randn(2, 30, VALUES)
        for count in (30, 1, 1, 1):
            x = torch.randn(2, count, HIDDEN)
            before = len(mla_compile.reports())
            o, after = compiled(x, past)
            expected = exact(x.double(), tuple(t.double() for t in past))[0]
            assert_as_close_as_eager(o, layer(x, past)[0], expected, factor=4.0)  # sums in another order
            paths += [site.path for report in mla_compile.reports()[before:] for site in report.sites]
            past = after
    assert paths == ["unchanged", "absorbed"]
    assert "+ 1" in mla_compile.last_report().sites[0].shapes["T"]  # the lengths of both caches are one symbol
