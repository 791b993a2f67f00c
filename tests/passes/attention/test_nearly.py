"""What is nearly attention has a reason that says why it is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import SCALE, Function, T, V


def online(*args: Tensor) -> Tensor:
    """Blocks of keys, with the greatest score so far and a running sum."""
    q, k, v = mla.naive(*args)
    rows = (*q.shape[:3], 1)
    greatest, total, o = q.new_full(rows, -torch.inf), q.new_zeros(rows), q.new_zeros((*q.shape[:3], V))
    for start in range(0, T, 4):
        scores = q @ k[:, :, start : start + 4].mT * SCALE
        now = torch.maximum(greatest, scores.amax(-1, keepdim=True))
        e, before = (scores - now).exp(), (greatest - now).exp()
        total, o = total * before + e.sum(-1, keepdim=True), o * before + e @ v[:, :, start : start + 4]
        greatest = now
    return o / total


def differential(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    a, b = ((each @ k.mT * SCALE).softmax(-1) for each in (q, q.flip(-1)))
    return (a - 0.3 * b) @ v


def half(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    return (q @ k.mT * SCALE).softmax(-1).nan_to_num(nan=0.5) @ v


REASONS = {
    online: "found one over blocks of keys, the greatest so far `maximum",
    differential: "expected attention weights of one softmax, found several in `sub` (sub.Tensor)",
    half: "found that `nan_to_num` (nan_to_num.default) puts other numbers in the place of NaN",
}


@pytest.mark.parametrize("function", REASONS)
def test_the_reason_says_what_it_is_instead(function: Function) -> None:
    for _, _, outcomes in compiled(function, mla.tensors()):
        assert outcomes
        for outcome in outcomes:
            assert outcome.path == "unchanged"
            assert REASONS[function] in outcome.reason


def test_each_of_several_softmaxes_is_attention_where_it_is_multiplied_first() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.softmax(q, k, v) - 0.3 * mla.softmax(q.flip(-1), k, v)

    for path, _, outcomes in compiled(attention, mla.tensors()):
        assert [outcome.path for outcome in outcomes] == [path] * 2
