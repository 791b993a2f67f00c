"""Scores that are multiplied after some of them became -inf, by a tensor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import SQ, Function, N, T


def hidden() -> Tensor:
    """Bool `[Sq, T]`, True at the keys after a query."""
    return torch.ones(SQ, T, dtype=torch.bool).triu(T - SQ + 1)


def masked(change: Function, fill: float = -torch.inf) -> Function:
    """MLA whose masked scores `[B, N, Sq, T]` are changed."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return change((q @ k.mT).masked_fill(hidden(), fill)).softmax(-1) @ v

    return attention


def of_heads() -> Tensor:
    """A number for each head, `[N, 1, 1]`, of either sign."""
    return torch.linspace(-1, 1, N, dtype=torch.float64).view(N, 1, 1)


POSITIVE: dict[str, Function] = {
    "a root of a tensor": lambda s: s / torch.sqrt(torch.tensor(20.0)),
    "the root of another": lambda s: torch.rsqrt(torch.full((), 20.0, dtype=s.dtype)) * s,
    "a reciprocal": lambda s: s * (1 / torch.sqrt(torch.tensor(20.0))),
    "a power": lambda s: s * torch.tensor(20.0) ** -0.5,
    "and the maximum subtracted": lambda s: (s - s.amax(-1, keepdim=True)) / torch.sqrt(torch.tensor(20.0)),
    "exp of each head": lambda s: s * of_heads().exp(),
    "divided by exp": lambda s: s / of_heads().exp().sqrt(),
    "softplus": lambda s: s * F.softplus(of_heads()) * 0.5,
    "clamped": lambda s: s * of_heads().clamp(min=0.1),
    "in a view": lambda s: (s.flatten(0, 1) * of_heads().exp().expand(2, N, 1, 1).flatten(0, 1)).view_as(s),
    "a sum": lambda s: s * (of_heads().sigmoid() + 0.1),
}


@pytest.mark.parametrize("function", POSITIVE.values(), ids=POSITIVE)
def test_hidden_keys_stay_hidden(function: Function) -> None:
    for path, _, (outcome,) in compiled(masked(function), mla.tensors()):
        assert outcome.path == path
        assert outcome.mask == "causal"


ELSE: dict[str, Function] = {
    "of any sign": masked(lambda s: s * (of_heads() + 1.5)),
    "a finite number": masked(lambda s: s * of_heads().exp(), -1e9),
    "less than a positive number": masked(lambda s: s * (2.0 - of_heads().sigmoid())),
    "at most a positive number": masked(lambda s: s * (of_heads() + 1.5).clamp(max=2.0)),
    "a bias": masked(lambda s: (s + s.new_tensor(math.pi)) * of_heads().exp()),
}


@pytest.mark.parametrize("function", ELSE.values(), ids=ELSE)
def test_else_it_is_a_function_of_the_scores(function: Function) -> None:
    for path, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == path
        assert outcome.mask == "none"
