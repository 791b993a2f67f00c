"""What an element of a mask is, where the mask is a part of something longer, or is written by flags."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, arange

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.mask_cases import Mask, attention
from tests.passes.spellings import B, T

CUT: dict[str, Mask] = {
    "positions": lambda s, t: arange(2 * t + 3)[3:].view(2, t)[0] <= arange(s)[:, None] + (t - s) + 3,
    "the second row of positions": lambda s, t: arange(1 + 2 * t)[1:].view(2, t)[1] <= arange(s)[:, None] + 2 * t - 2,
    "a triangle": lambda s, t: torch.ones(3 * s + 1, t, dtype=torch.bool).tril()[1:].view(3, s, t)[1],
    "a triangle unbound": lambda s, t: torch.ones(3 * s + 2, t, dtype=torch.bool).tril()[2:].view(3, s, t).unbind()[2],
}


@pytest.mark.parametrize("mask", CUT.values(), ids=CUT)
def test_rows_of_what_was_cut_off_the_front(mask: Mask) -> None:
    for path, _, (outcome,) in compiled(attention(mask), mla.tensors()):
        assert (outcome.path, outcome.mask) == (path, "causal")


def flagged(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Of the five best keys of each query, those whose scores are above a threshold."""
    best, indices = (x[..., : latent.shape[2]] @ latent.mT).topk(5, -1)
    seen = torch.zeros(B, x.shape[1], T, dtype=torch.bool).scatter(-1, indices, best > 0)
    return mla.softmax(
        *mla.naive(x, latent, k_rope, w_q, w_kv), lambda scores: scores.masked_fill(~seen[:, None], -math.inf)
    )


def until(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The best keys, until their weights sum up to 0.9."""
    found, indices = (x[..., : latent.shape[2]] @ latent.mT).sort(-1, descending=True)
    weights = found.softmax(-1)
    keep = weights.cumsum(-1) - weights < 0.9
    seen = torch.zeros_like(keep).scatter(-1, indices, keep)
    return mla.sealed(*mla.naive(x, latent, k_rope, w_q, w_kv), seen[:, None])


@pytest.mark.parametrize("function", [flagged, until])
@pytest.mark.parametrize("path", ["absorbed", "chunked", "sparse"])
def test_flags_that_are_scattered_to_the_keys_that_indices_name(function: mla.Function, path: str) -> None:
    """A flag belongs to the place of its index, not to the key that the index names."""
    (found,) = [outcomes[0] for _, _, outcomes in compiled(function, mla.tensors(), paths=(path,))]
    assert (found.rewritten, found.mask) == (True, "tensor")
