"""Differential attention becomes two attentions, and weights times numbers of rows or keys one, if all are MLA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.passes import spellings as mla
from tests.passes.checks import check_unchanged, compiled, unfolded
from tests.passes.spellings import SCALE, SQ, Function, N, T


def differential(subtract: Function, values: Function = lambda v: v, dtype: torch.dtype | None = None) -> Function:
    """Two softmaxes, each with its own queries, and `subtract` of the two as attention weights."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        a, b = ((each @ k.mT * SCALE).softmax(-1, dtype=dtype) for each in (q, q.flip(-1)))
        return subtract(a, b).to(v.dtype) @ values(v)

    return attention


def multiplied(factor: Function, values: Function = lambda v: v) -> Function:
    """One softmax, multiplied by `factor(q)`, where `q` is `[B, N, Sq, P + R]`."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return ((q @ k.mT * SCALE).softmax(-1) * factor(q)) @ values(v)

    return attention


def divided(more: Function) -> Function:
    """One softmax, divided by `more` of the sum of its weights."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        w = (q @ k.mT * SCALE).softmax(-1)
        return (w / more(w.sum(-1, keepdim=True))) @ v

    return attention


def halves(divide: Function, values: Function = lambda v: v, dim: int = 2) -> Function:
    """As `differential`, but with one softmax `[B, 2 N, Sq, T]`, which `divide` divides.

    The two of a head are side by side if `dim` is 2, or those of all heads behind one another if it is 1.
    """

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        twice = [torch.stack(each, dim).flatten(1, 2) for each in ((q, q.flip(-1)), (k, k))]
        a, b = divide((twice[0] @ twice[1].mT * SCALE).softmax(-1))
        return (a - heads() * b) @ values(v)

    return attention


def heads() -> Tensor:
    return torch.arange(N)[:, None, None].double() / N


def keys() -> Tensor:
    return torch.arange(T).double() / T


def hidden() -> Tensor:
    return torch.arange(T) > torch.arange(SQ)[:, None] + T - SQ


REWRITTEN: dict[str, tuple[Function, int]] = {
    "a number": (differential(lambda a, b: a - 0.3 * b), 2),
    "a tensor of no dimension": (differential(lambda a, b: a - torch.full((), 0.3).double() * b), 2),
    "a number a head": (differential(lambda a, b: a - b * heads()), 2),
    "all times a number": (differential(lambda a, b: (a - 0.3 * b) * 0.5 + a), 2),
    "by alpha": (differential(lambda a, b: torch.sub(a, b, alpha=0.3)), 2),
    "one, times a number": (multiplied(lambda q: 0.3), 1),
    "one, divided by a number": (differential(lambda a, b: a / 3), 1),
    "one, divided by its sum and a number": (divided(lambda total: total + 0.1), 1),
    "one, divided by its sum and numbers": (divided(lambda total: 0.1 + total + torch.full((), 0.2).double()), 1),
    "the difference, divided by a number": (differential(lambda a, b: (a - b) / 3), 2),
    "one, times a number a head": (multiplied(lambda q: heads()), 1),
    "one, times a gate a query": (multiplied(lambda q: q[..., :1].sigmoid()), 1),
    "one, times a mask and a number": (multiplied(lambda q: (heads() > 0) * 2.0), 1),
    "a number a key": (differential(lambda a, b: a - b * keys()), 2),
    "numbers of keys and heads": (differential(lambda a, b: keys() * a - b * heads() * keys()), 2),
    "one, times a number a key": (multiplied(lambda q: keys()), 1),
    "one, times a number a sequence and key": (multiplied(lambda q: keys() + q.sum((1, 2, 3), keepdim=True)), 1),
    "two of one softmax": (halves(lambda w: w.unflatten(1, (N, 2)).unbind(2)), 2),
    "two of one softmax, selected": (halves(lambda w: [w.view(-1, N, 2, SQ, T)[:, :, i] for i in range(2)]), 2),
    "two of one softmax, every second": (halves(lambda w: (w[:, ::2], w[:, 1::2])), 2),
    "two of one softmax, its halves": (halves(lambda w: w.chunk(2, 1), dim=1), 2),
    "one that stays": (lambda *args: mla.combined(*args) + differential(lambda a, b: a - b)(*args), 3),
}


@pytest.mark.parametrize(("function", "count"), REWRITTEN.values(), ids=REWRITTEN)
def test_each_softmax_is_an_attention(function: Function, count: int) -> None:
    for path, module, outcomes in compiled(function, mla.tensors()):
        assert [outcome.path for outcome in outcomes] == [path] * count
        assert not unfolded(module)


def test_sizes_that_are_not_known() -> None:
    for path, _, outcomes in compiled(REWRITTEN["a number a head"][0], mla.tensors(), mla.UNKNOWN):
        assert [outcome.path for outcome in outcomes] == [path] * 2


UNCHANGED: dict[str, Function] = {
    "a number a query and key": differential(lambda a, b: a - b * hidden()),
    "one, times a number a head and key": multiplied(lambda q: keys() * heads()),
    "two of one softmax, of other values": halves(lambda w: w.unflatten(1, (N, 2)).unbind(2), torch.tanh),
    "one, times a number a head, of other values": multiplied(lambda q: heads(), torch.tanh),
    "values that are no up-projection": differential(lambda a, b: a - b, torch.tanh),
    "divided by a sum of others": differential(lambda a, b: a / (b.sum(-2, keepdim=True) + 0.1)),
    "divided by a sum less a number": divided(lambda total: total - 0.1),
    "divided by a sum over queries": differential(lambda a, b: a / (a.sum(-2, keepdim=True) + 0.1)),
    "something that is no softmax": differential(lambda a, b: a - b.tanh()),
    "set to 0 after": differential(lambda a, b: a - b.masked_fill(hidden(), 0.0)),
    "a function of the difference": differential(lambda a, b: (a - b).relu()),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_what_is_no_sum_of_attentions_stays_as_it_is(function: Function) -> None:
    check_unchanged(function, mla.tensors())


class Differential(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return differential(lambda a, b: a - 0.3 * b, dtype=torch.float32)(*args)


class OfOneSoftmax(nn.Module):
    """With a sink, whose weights meet no values."""

    def forward(self, *args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        pairs = torch.stack([q, q.flip(-1)], 2).flatten(1, 2) @ k.repeat_interleave(2, 1).mT * SCALE
        sink = torch.arange(2 * N, dtype=q.dtype)[:, None, None].expand(*pairs.shape[:3], 1) / N
        w = torch.cat([pairs, sink], -1).softmax(-1)[..., :-1].unflatten(1, (N, 2))
        return (w[:, :, 0] - 0.3 * w[:, :, 1]) @ v


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "dynamic"), [(Differential, None), (OfOneSoftmax, False), (OfOneSoftmax, True)])
def test_compiled_and_verified(kind: type[nn.Module], dynamic: bool | None, dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in mla.tensors()]
    exact = kind()(*(t.double() for t in given))
    o = torch.compile(kind(), backend="mla", dynamic=dynamic, options={"mla.verify": True})(*given)
    eager = (kind()(*given).double() - exact).abs().max()
    assert (o.double() - exact).abs().max() <= 4 * eager
    assert mla_compile.last_report().rewritten == 2
