"""Differential attention becomes two attentions, and weights times one number per row become one, if all are MLA."""

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


def heads() -> Tensor:
    return torch.arange(N)[:, None, None].double() / N


def hidden() -> Tensor:
    return torch.arange(T) > torch.arange(SQ)[:, None] + T - SQ


REWRITTEN: dict[str, tuple[Function, int]] = {
    "a number": (differential(lambda a, b: a - 0.3 * b), 2),
    "a tensor of no dimension": (differential(lambda a, b: a - torch.full((), 0.3).double() * b), 2),
    "a number a head": (differential(lambda a, b: a - b * heads()), 2),
    "all times a number": (differential(lambda a, b: (a - 0.3 * b) * 0.5 + a), 2),
    "by alpha": (differential(lambda a, b: torch.sub(a, b, alpha=0.3)), 2),
    "one, times a number a head": (multiplied(lambda q: heads()), 1),
    "one, times a gate a query": (multiplied(lambda q: q[..., :1].sigmoid()), 1),
    "one, times a mask and a number": (multiplied(lambda q: (heads() > 0) * 2.0), 1),
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
    "a number a key": differential(lambda a, b: a - b * torch.arange(T).double()),
    "a number a query and key": differential(lambda a, b: a - b * hidden()),
    "one, times a number a key": multiplied(lambda q: torch.arange(T).double()),
    "one, times a number a head, of other values": multiplied(lambda q: heads(), torch.tanh),
    "values that are no up-projection": differential(lambda a, b: a - b, torch.tanh),
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


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_compiled_and_verified(dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in mla.tensors()]
    exact = Differential()(*(t.double() for t in given))
    o = torch.compile(Differential(), backend="mla", options={"mla.verify": True})(*given)
    eager = (Differential()(*given).double() - exact).abs().max()
    assert (o.double() - exact).abs().max() <= 4 * eager
    assert mla_compile.last_report().rewritten == 2
