"""Masks as one tensor of numbers, beside an offset."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, arange

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import SCALE, SQ, T

LOWEST = torch.finfo(torch.float64).min


def twice(hidden: Callable[[], Tensor]) -> mla.Function:
    """The same bias twice, and hidden keys."""

    def function(x: Tensor, latent: Tensor, *more: Tensor) -> Tensor:
        q, k, v = mla.naive(x, latent, *more)
        bias = x[:, :, :T][:, None]
        return (q @ k.mT * SCALE + bias + bias).masked_fill(hidden(), -math.inf).softmax(-1) @ v

    return function


HIDDEN_KEYS = {
    "window": lambda: (arange(T) > arange(SQ)[:, None] + 4) | (arange(T) <= arange(SQ)[:, None]),
    "padding": lambda: (arange(T) > 2) & (arange(T) < 5),
    "causal": lambda: arange(T) > arange(SQ)[:, None] + 4,
}


@pytest.mark.parametrize("hidden", HIDDEN_KEYS.values(), ids=HIDDEN_KEYS)
def test_a_bias_that_is_added_twice(hidden: Callable[[], Tensor]) -> None:
    for path, _, (outcome,) in compiled(twice(hidden), mla.tensors()):
        assert outcome.path == path


@pytest.mark.parametrize("fill", [LOWEST, LOWEST / 2, -1e300, -1e38])
@pytest.mark.parametrize("added", [True, False])
def test_a_query_from_which_a_number_below_those_of_float32_hides_all_keys(fill: float, added: bool) -> None:
    """It attends to all keys alike, as in eager code: its log-sum-exp is finite, though it is stored in float32."""

    def function(*tensors: Tensor) -> Tensor:
        q, k, v = mla.naive(*tensors)
        hidden = arange(T) > arange(SQ)[:, None] - 1
        if added:
            return mla.sealed(q, k, v, torch.zeros(SQ, T, dtype=q.dtype).masked_fill(hidden, fill))
        return mla.softmax(q, k, v, lambda scores: scores.masked_fill(hidden, fill))

    for path, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == path
