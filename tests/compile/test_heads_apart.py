"""Heads that are computed one by one, in a list of modules, are one attention if they share a latent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.steps import prompts_and_steps
from tests.training import assert_every_gradient

HIDDEN, N, P, R, V, L = 48, 3, 16, 8, 12, 20


class Head(nn.Module):
    """One head: SDPA, or a softmax by hand."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.query = nn.Linear(HIDDEN, P + R, bias=False)
        self.key, self.value = nn.Linear(L, P, bias=False), nn.Linear(L, V)

    def forward(self, x: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.query(x), torch.cat([self.key(latent), k_rope], -1), self.value(latent)
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, seen)
        scores = (q @ k.transpose(-2, -1) * (P + R) ** -0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v


class Model(nn.Module):
    """Heads, whose outputs are joined by `join`."""

    def __init__(self, *, by_hand: bool = False, join: str = "cat") -> None:
        super().__init__()
        self.join = join
        self.heads = nn.ModuleList(Head(by_hand=by_hand) for _ in range(N))
        self.down, self.o_proj = nn.Linear(HIDDEN, L + R, bias=False), nn.Linear(N * V, HIDDEN, bias=False)

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        past = torch.cat([past, self.down(x)], 1)
        latent, k_rope = past.split([L, R], -1)
        seen = torch.ones(x.shape[1], past.shape[1], dtype=torch.bool).tril(past.shape[1] - x.shape[1])
        outputs = [head(x, latent, k_rope, seen) for head in self.heads]
        if self.join == "stack":
            joined = torch.stack(outputs, 2).flatten(2)
        elif self.join == "unsqueezed":
            joined = torch.cat([o.unsqueeze(1) for o in outputs], 1).transpose(1, 2).flatten(2)
        else:
            joined = torch.cat(outputs, -1)
        return self.o_proj(joined), (past,)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("by_hand", "join"),
    [
        (True, "cat"),
        (False, "unsqueezed"),
        pytest.param(False, "cat", marks=pytest.mark.slow),
        pytest.param(True, "stack", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("without_codegen")
def test_prompts_and_steps_at_any_length(dtype: torch.dtype, by_hand: bool, join: str) -> None:
    torch.manual_seed(0)
    empty = (torch.zeros(2, 0, L + R, dtype=dtype),)
    sites = prompts_and_steps(Model(by_hand=by_hand, join=join).to(dtype), empty, HIDDEN)
    assert [(site.path, site.shapes["N"]) for site in sites] == [
        (path, str(N)) for path in ("chunked", "absorbed", "chunked")
    ]


@pytest.mark.parametrize("by_hand", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients(by_hand: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 40, HIDDEN), torch.zeros(2, 0, L + R)]
    rewritten = assert_every_gradient(Model(by_hand=by_hand), inputs)
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]
