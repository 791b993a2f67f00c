"""Writes to rows of a tensor, by indices of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import B, N, P, R, T


def to_one_column(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Each index names the same column, so that only one is written."""
    k_nope, v = mla.up_projected(latent, w_kv)
    k = torch.zeros(B, N, T, P + R, dtype=latent.dtype)
    k[..., :P] = k_nope
    k[..., torch.arange(P, P + 1).expand(2)] = mla.to_heads(k_rope)[..., :1]
    return mla.softmax(mla.queries(x, w_q), k, v)


def test_indices_that_are_all_the_same() -> None:
    for _, _, (outcome,) in compiled(to_one_column, mla.tensors()):
        assert not outcome.rewritten
