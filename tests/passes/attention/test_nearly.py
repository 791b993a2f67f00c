"""What is nearly attention, but not quite, stays unchanged with a reason that says what it is instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SCALE, SQ, Function, T, V


def online(*args: Tensor) -> Tensor:
    """A softmax over blocks of keys, with the greatest score so far and a running sum."""
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
    """Differential attention whose values are not an up-projection: two products would gain nothing."""
    q, k, v = mla.naive(*args)
    a, b = ((each @ k.mT * SCALE).softmax(-1) for each in (q, q.flip(-1)))
    return (a - 0.3 * b) @ v.tanh()


def differential_of_halves(*args: Tensor) -> Tensor:
    """Differential attention with one softmax for pairs of heads."""
    q, k, v = mla.naive(*args)
    pairs = (torch.stack([q, q.flip(-1)], 2) @ k[:, :, None].mT * SCALE).softmax(-1)
    return (pairs[:, :, 0] - 0.3 * pairs[:, :, 1]) @ v.tanh()


def half(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    return (q @ k.mT * SCALE).softmax(-1).nan_to_num(nan=0.5) @ v


def gated(*args: Tensor) -> Tensor:
    """Attention weights multiplied by one number for each query and key."""
    q, k, v = mla.naive(*args)
    return ((q @ k.mT * SCALE).softmax(-1) * torch.arange(SQ * T).view(SQ, T).double()) @ v


def divided_again(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    seen = (torch.arange(T) > 2).double()
    weights = (q @ k.mT * SCALE).softmax(-1) * seen
    return weights / (weights.sum(-1, keepdim=True) + 1e-9) @ v


REASONS = {
    gated: "expected attention weights as a softmax gives them, found them multiplied in `mul_1` (mul.Tensor)",
    divided_again: "expected attention weights that add up to 1, found them divided by `add` (add.Tensor)",
    online: "found one over blocks of keys, with a running maximum `maximum",
    differential: "expected attention weights of one softmax, found several in `sub` (sub.Tensor)",
    differential_of_halves: "expected attention weights of one softmax, found several in `sub` (sub.Tensor)",
    half: "found that `nan_to_num` (nan_to_num.default) replaces NaN by a number other than 0",
}


@pytest.mark.parametrize("again", [False, True], ids=["multiplied", "divided again"])
def test_weights_of_a_router_are_none(again: bool) -> None:
    """A mixture of experts has a softmax and a sum over experts, but nothing is reported for it."""

    def routed(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
        gates = (x @ router).softmax(-1) * torch.linspace(0.5, 1, 3).double()
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-9) if again else gates
        return torch.einsum("te,ted->td", gates, torch.einsum("th,ehd->ted", x, experts))

    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 8), (8, 3), (3, 8, 4))]
    assert not rewrite(capture(routed, *tensors))


@pytest.mark.parametrize("function", REASONS)
def test_the_reason_says_what_it_is_instead(function: Function) -> None:
    for _, _, outcomes in compiled(function, mla.tensors()):
        assert outcomes
        for outcome in outcomes:
            assert outcome.path == "unchanged"
            assert REASONS[function] in outcome.reason


def test_a_dropout_of_the_weights_is_said() -> None:
    def dropped(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return torch.ops.aten.native_dropout((q @ k.mT * SCALE).softmax(-1), 0.5, True)[0] @ v

    (outcome,) = rewrite(capture(dropped, *mla.tensors()))
    assert outcome.path == "unchanged"
    assert "as a softmax gives them, found them multiplied in `getitem_2`" in outcome.reason
    assert "call model.eval()" in outcome.remedy
