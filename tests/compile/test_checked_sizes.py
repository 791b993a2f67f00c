"""Code that compares sizes before it computes: torch may put several equations into one guard, and solve one alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager

N, P, L, HIDDEN = 4, 8, 16, 32


class Checked(nn.Module):
    """MLA without rope that refuses masks of other sizes, as DeepSeek-V2's own code does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(HIDDEN, N * P), nn.Linear(HIDDEN, L)
        self.up_k, self.up_v = nn.Linear(L, N * P), nn.Linear(L, N * P)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        batch, tokens, _ = hidden_states.shape
        if attention_mask.size() != (batch, 1, tokens, tokens):
            raise ValueError("another mask")
        latent = self.down(hidden_states)
        q, k, v = (
            linear(x).view(batch, tokens, N, P).transpose(1, 2)
            for linear, x in ((self.q, hidden_states), (self.up_k, latent), (self.up_v, latent))
        )
        return (q @ k.mT * P**-0.5 + attention_mask).softmax(-1) @ v


@pytest.mark.usefixtures("without_codegen")
def test_sizes_that_were_compared_are_one() -> None:
    torch.manual_seed(0)
    layer = Checked().eval()
    compiled, exact = torch.compile(layer, backend="mla"), copy.deepcopy(layer).double()
    with torch.no_grad():
        for tokens in (16, 23, 40):
            given = torch.randn(2, tokens, HIDDEN), torch.randn(2, 1, tokens, tokens)
            assert_as_close_as_eager(compiled(*given), layer(*given), exact(*(t.double() for t in given)))
    assert [site.path for report in mla_compile.reports() for site in report.sites] == ["chunked"] * 2
    with torch.no_grad(), pytest.raises(ValueError, match="another mask"):
        compiled(torch.randn(2, 9, HIDDEN), torch.randn(2, 1, 9, 10))
