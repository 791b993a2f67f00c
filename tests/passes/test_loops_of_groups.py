"""Loops over heads in two groups that each have their own latent: rewritten group by group, or left unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.checks import compiled
from tests.passes.spellings import SCALE, Function

B, S, T, N, L, P, R, V = 2, 3, 7, 4, 6, 4, 2, 5


def tensors() -> list[Tensor]:
    shapes = (B, N, S, P + R), (B, T, 2 * L), (B, T, R), (N, P + V, L)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def looped(*, joined: bool, scale: float = 1.0, values: Function = lambda v, n: v[:, n]) -> Function:
    """Scores and outputs are computed head by head, then `joined` or written to a buffer.

    `scale` multiplies the keys; `values(v, n)` are the values of head n.
    """

    def in_row(pieces: list[Tensor]) -> Tensor:
        if joined:
            return torch.stack(pieces, 1)
        whole = pieces[0].new_empty(B, N, *pieces[0].shape[1:])
        for n, piece in enumerate(pieces):
            whole[:, n] = piece
        return whole

    def attention(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
        halves = [F.rms_norm(half, (L,)) for half in latent.chunk(2, -1)]
        groups = [torch.einsum("btl,ndl->bntd", c, w) for c, w in zip(halves, w_kv.chunk(2), strict=True)]
        k_nope, v = torch.cat(groups, 1).split([P, V], -1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], -1) * scale
        weights = (in_row([q[:, n] @ k[:, n].mT for n in range(N)]) * SCALE).softmax(-1)
        return in_row([weights[:, n] @ values(v, n) for n in range(N)])

    return attention


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_loop_over_heads_is_an_attention_a_group(joined: bool, scale: float) -> None:
    for path, _, (outcome,) in compiled(looped(joined=joined, scale=scale), tensors()):
        assert outcome.path == path


def test_padded_values_are_those_without_zeros() -> None:
    padded = looped(joined=True, values=lambda v, n: F.pad(v, (0, 1))[:, n])
    for path, _, (outcome,) in compiled(lambda *args: padded(*args)[..., :V], tensors()):
        assert outcome.path == path


def test_values_of_the_other_group_have_another_latent_than_the_keys() -> None:
    for path, _, (outcome,) in compiled(looped(joined=True, values=lambda v, n: v[:, (n + 2) % N]), tensors()):
        assert outcome.path == path
        assert outcome.shapes["Lk"] == str(L)


def test_values_in_another_order_stay() -> None:
    for _, _, outcomes in compiled(looped(joined=True, values=lambda v, n: v[:, n].flip(1)), tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)
