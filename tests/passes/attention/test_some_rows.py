"""Products that take the weights of some rows only: of the last query, or of some heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled, unfolded
from tests.passes.spellings import SCALE, SQ, Function, N, T


def rows(take: Function, change: Function = lambda s: s) -> Function:
    """`take` is given attention weights `[B, N, Sq, T]` and values; `change` is applied to the scores."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return take(change(q @ k.mT * SCALE).softmax(-1), v)

    return attention


def last(w: Tensor, v: Tensor) -> Tensor:
    return w[:, :, -1:] @ v


def causal(s: Tensor) -> Tensor:
    return s.masked_fill(torch.arange(T) > torch.arange(T - SQ, T)[:, None], -torch.inf)


def far(s: Tensor) -> Tensor:
    """A bias of each query and key."""
    return s - (torch.arange(T - SQ, T)[:, None] - torch.arange(T)).abs() / N


def hot(s: Tensor) -> Tensor:
    """A temperature of each query."""
    return s * torch.arange(1, SQ + 1)[:, None].double()


TAKEN: dict[str, Function] = {
    "the last query": last,
    "all but the last query": lambda w, v: w[:, :, :-1] @ v,
    "every second query": lambda w, v: w[:, :, ::2] @ v,
    "one head": lambda w, v: w[:, 2] @ v[:, 2],
    "some heads": lambda w, v: w[:, 1:4] @ v[:, 1:4],
    "every second head": lambda w, v: w[:, ::2] @ v[:, ::2],
}
CHANGED: dict[str, Function] = {"as they are": lambda s: s, "causal": causal, "far": far, "hot": hot}


@pytest.mark.diagonal
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_they_are_attention(take: Function, change: Function) -> None:
    check_rewritten(rows(take, change), mla.tensors())


def test_they_are_attention_for_sizes_that_are_not_known() -> None:
    check_rewritten(rows(last, hot), mla.tensors(), [(0,), (0,), (0,)])


def test_each_product_is_one() -> None:
    def both(w: Tensor, v: Tensor) -> Tensor:
        first, others = w.split([1, SQ - 1], 2)
        return first @ v - (others @ v).sum(2, keepdim=True)

    for path, module, outcomes in compiled(rows(both), mla.tensors()):
        assert [outcome.path for outcome in outcomes] == [path] * 2
        assert not unfolded(module)


UNCHANGED: dict[str, Function] = {
    "a function of the scores": rows(last, lambda s: s.tanh()),
    "weights that are returned too": rows(lambda w, v: torch.cat([w[:, :, -1:] @ v, w[:, :, 1:2]], -1)),
    "keys of which some are left out": rows(lambda w, v: w[:, :, -1:, 1:] @ v[:, :, 1:]),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_what_needs_all_weights_stays_as_it_is(function: Function) -> None:
    check_unchanged(function, mla.tensors())
