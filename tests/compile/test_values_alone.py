"""Decode steps whose whole keys get a rope after their up-projection: only values are absorbed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager

N, L, D, HIDDEN = 4, 32, 16, 24


def turned(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] / 10 ** torch.arange(0, 2, 4 / D)
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Caches latents. Keys are normed per head, and then all of their columns are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, N * D, bias=False)
        self.down = nn.Linear(HIDDEN, L, bias=False)
        self.up = nn.Linear(L, N * 2 * D, bias=False)

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        latent = torch.cat([past, self.down(x)], 1)
        k, v = self.up(latent).unflatten(-1, (N, 2 * D)).transpose(1, 2).chunk(2, -1)
        q = self.q(x).unflatten(-1, (N, D)).transpose(1, 2)
        positions = torch.arange(latent.shape[1])
        q, k = turned(q, positions[past.shape[1] :]), turned(F.rms_norm(k, (D,)), positions)
        mask = positions <= positions[past.shape[1] :, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2), latent


@pytest.mark.slow
def test_a_step_is_rewritten_and_right() -> None:
    check(torch.float32, (1,), dynamic=False)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_every_step_of_a_decode_is_rewritten_and_right(dtype: torch.dtype) -> None:
    check(dtype, (1, 1, 2, 2), dynamic=True)


def check(dtype: torch.dtype, counts: Sequence[int], *, dynamic: bool) -> None:
    """Check that decode steps of so many tokens each take the path and are as near to float64 as eager's."""
    torch.manual_seed(0)
    eager = Attention().to(dtype).requires_grad_(False)
    exact = Attention().double().requires_grad_(False)
    exact.load_state_dict(eager.state_dict())
    compiled = torch.compile(eager, backend="mla", fullgraph=True, dynamic=dynamic)
    past = torch.randn(2, 60, L, dtype=dtype)
    for count in counts:
        x = torch.randn(2, count, HIDDEN, dtype=dtype)
        o, latent = compiled(x, past)
        report = mla_compile.last_report()
        assert report is not None
        assert [site.path for site in report.sites] == ["values"]
        theirs, own = eager(x, past)
        assert_as_close_as_eager(o, theirs, exact(x.double(), past.double())[0])
        past = own
        torch.testing.assert_close(latent, own, rtol=0, atol=8 * float(own.abs().max()) * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("without_codegen")
def test_a_prompt_is_stock_inductors() -> None:
    model = Attention().requires_grad_(False)
    x, nothing = torch.randn(1, 64, HIDDEN), torch.empty(1, 0, L)
    o, _ = torch.compile(model, backend="mla", fullgraph=True)(x, nothing)
    (site,) = mla_compile.last_report().sites
    assert site.path == "unchanged"
    assert "expected keys of which some columns are an up-projection" in site.reason
    torch.testing.assert_close(o, model(x, nothing)[0])
