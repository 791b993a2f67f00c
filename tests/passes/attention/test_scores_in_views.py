"""Scores that are masked in another shape than that of their softmax, with sequences and heads in one dimension."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import SCALE, SQ, UNKNOWN, Function, N, T


def merged(change: Function) -> Function:
    """MLA with sequences and heads in one dimension, `change` applied to the scores `[B, N, Sq, T]`."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in mla.naive(*args))
        scores = change(torch.bmm(q * SCALE, k.mT).view(-1, N, q.shape[1], k.shape[1]))
        weights = scores.view(-1, q.shape[1], k.shape[1]).softmax(-1)
        return torch.bmm(weights, v).view(-1, N, q.shape[1], v.shape[2])

    return attention


def divided(change: Function) -> Function:
    """MLA with a softmax of scores `[B, N, Sq, T]`, `change` applied to them as `[B N, Sq, T]`."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = q @ k.mT * SCALE
        return change(scores.flatten(0, 1)).view_as(scores).softmax(-1) @ v

    return attention


def padded() -> Tensor:
    """Bool `[B, 1, 1, T]`, True at the keys that are padding."""
    return (torch.arange(T) >= torch.tensor([[T], [T - 4]]))[:, None, None]


def later() -> Tensor:
    """Bool `[Sq, T]`, True at the keys after a query."""
    return torch.ones(SQ, T, dtype=torch.bool).triu(T - SQ + 1)


def slopes() -> Tensor:
    """A number for each head, `[N, 1, 1]`."""
    return torch.linspace(0.5, 1.5, N, dtype=torch.float64).view(N, 1, 1)


def twice(s: Tensor) -> Tensor:
    """Filled in one shape, and again in the other."""
    flat = s.masked_fill(padded(), -torch.inf).flatten(0, 1)
    return flat.masked_fill(later(), -torch.inf).view_as(s)


KNOWN: dict[str, Function] = {
    "padding": merged(lambda s: s.masked_fill(padded(), -torch.inf)),
    "a finite number": merged(lambda s: s.masked_fill(padded(), -1e9)),
    "where": merged(lambda s: torch.where(padded(), -torch.inf, s)),
    "a new tensor where it is padding": merged(lambda s: torch.where(padded(), s.new_full((), -torch.inf), s)),
    "padding and a bias": merged(lambda s: (s + torch.arange(T) * slopes()).masked_fill(padded(), -torch.inf)),
    "a bias and padding": merged(lambda s: s.masked_fill(padded(), -torch.inf) + torch.arange(T) * slopes()),
    "times a number of each head": merged(lambda s: (s * slopes()).masked_fill(padded(), -torch.inf)),
    "in both shapes": merged(twice),
    "a mask of both": divided(lambda s: s.masked_fill(padded().repeat_interleave(N, 0)[:, 0], -torch.inf)),
}


@pytest.mark.parametrize("function", KNOWN.values(), ids=KNOWN)
def test_a_mask_over_sequences_and_heads(function: Function) -> None:
    for path, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == path


def test_sizes_that_are_not_known() -> None:
    def attention(hidden: Tensor, *args: Tensor) -> Tensor:
        return merged(lambda s: s.masked_fill(hidden, -torch.inf))(*args)

    hidden = padded()
    for path, _, (outcome,) in compiled(attention, (hidden, *mla.tensors()), [(0, 0), (0, 3), *UNKNOWN]):
        assert outcome.path == path


def test_rows_that_are_not_in_order_stay_apart() -> None:
    """Heads before sequences: a mask of each sequence is of other rows."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in mla.naive(*args))
        scores = torch.bmm(q * SCALE, k.mT).view(N, -1, q.shape[1], k.shape[1])
        scores = scores.masked_fill(padded()[:, 0], -torch.inf)
        return torch.bmm(scores.view(-1, q.shape[1], k.shape[1]).softmax(-1), v)

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path


def test_queries_and_keys_in_one_dimension() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = q @ k.mT * SCALE
        hidden = torch.arange(SQ * T) % 5 == 0
        return scores.flatten(-2).masked_fill(hidden, -torch.inf).view_as(scores).softmax(-1) @ v

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path
