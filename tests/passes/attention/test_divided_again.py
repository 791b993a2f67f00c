"""Attention weights that are divided by their own sum, which is 1, are the weights that they were: those divided by
their sum and an epsilon are a multiple of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.attention.test_zeroed import seen, weighed
from tests.passes.checks import compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import Function


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(~seen(), -torch.inf)


def again(weights: Tensor, bound: Callable[[Tensor], Tensor] = lambda total: total) -> Tensor:
    return weights / bound(weights.sum(-1, keepdim=True))


def powers(scores: Tensor) -> Tensor:
    return again((scores - scores.amax(-1, keepdim=True)).exp())


def inverted(weights: Tensor) -> Tensor:
    return weights * (1 / weights.sum(-1, keepdim=True))


ONE: dict[str, Function] = {
    "softmax": weighed(lambda s: again(s.softmax(-1))),
    "powers": weighed(lambda s: again(powers(s))),
    "twice": weighed(lambda s: again(again(s.softmax(-1)))),
    "times the inverse": weighed(lambda s: inverted(s.softmax(-1))),
    "normalize": weighed(lambda s: F.normalize(s.softmax(-1), p=1.0, dim=-1)),
    "normalized powers": weighed(lambda s: F.normalize((s - s.amax(-1, keepdim=True)).exp(), p=1.0, dim=-1)),
    "bounded": weighed(lambda s: again(s.softmax(-1), lambda total: total.clamp(min=1e-9))),
    "bounded by 1": weighed(lambda s: again(s.softmax(-1), lambda total: total.clamp_min(1.0))),
    "an epsilon that is rounded away": weighed(lambda s: again(s.softmax(-1), lambda total: total + 1e-8)),
    "an epsilon that counts": weighed(lambda s: again(s.softmax(-1), lambda total: total + 0.1)),
    "rows of nothing, 0 and an epsilon": weighed(
        lambda s: again(hidden(s).softmax(-1).nan_to_num(), lambda total: total + 1e-6)
    ),
    "rows of nothing": weighed(lambda s: again(hidden(s).softmax(-1))),
    "rows of nothing, 0 at first": weighed(lambda s: again(hidden(s).softmax(-1).nan_to_num())),
    "rows of nothing, 0 and bounded": weighed(
        lambda s: again(hidden(s).softmax(-1).nan_to_num(), lambda total: total.clamp(min=1e-9))
    ),
    "rows of nothing, 0 and normalized": weighed(lambda s: F.normalize(hidden(s).softmax(-1).nan_to_num(), 1.0, -1)),
}
OTHERS: dict[str, Function] = {
    "an epsilon a query": weighed(lambda s: again(s.softmax(-1), lambda total: total + 0.1 * (s[..., :1] > 0))),
    "bounded by more": weighed(lambda s: again(s.softmax(-1), lambda total: total.clamp_min(1.5))),
    "bounded from above": weighed(lambda s: again(s.softmax(-1), lambda total: total.clamp(1e-9, 0.5))),
    "another norm": weighed(lambda s: F.normalize(s.softmax(-1), p=2.0, dim=-1)),
    "the sum over queries": weighed(lambda s: s.softmax(-1) / s.softmax(-1).sum(-2, keepdim=True)),
    "the sum of something else": weighed(lambda s: s.softmax(-1) / (2 * s).exp().sum(-1, keepdim=True)),
    "a share for a key without a value": weighed(lambda s: again(s.exp() / (1 + s.exp().sum(-1, keepdim=True)))),
}


@pytest.mark.parametrize("function", ONE.values(), ids=ONE)
def test_their_sum_is_1(function: Function) -> None:
    tensors = [tensor.float() for tensor in mla.tensors()]
    for path in ("absorbed", "chunked"):
        captured = capture(function, *tensors)
        expected = run(captured, *tensors)
        (outcome,) = rewrite(captured, path)
        assert outcome.path == path
        assert_as_close_as_eager(run(captured, *tensors), expected, function(*mla.tensors()))


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_what_else_they_are_divided_by_counts(function: Function) -> None:
    for _, _, outcomes in compiled(function, mla.tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)
