"""Attentions of one head each, whose outputs are joined: one attention where heads share a latent, else one each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, UNKNOWN, Function, L, N, P, R, T

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "cat of columns": lambda o: torch.cat(o, -1),
    "stack": lambda o: torch.stack(o, 1),
    "stack of columns": lambda o: torch.stack(o, -1),
    "cat of heads": lambda o: torch.cat([each[:, None] for each in o], 1),
    "cat of queries": lambda o: torch.cat(o, 1),
    "cat of transposed": lambda o: torch.cat([each.mT for each in o], 1),
}
SEEN = torch.ones(SQ, T, dtype=torch.bool).tril(T - SQ)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each head makes its mask again."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ v


ATTENTIONS: dict[str, Attend] = {"sealed": mla.sealed, "by hand": by_hand, "causal": causal}


def heads(args: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The queries, keys and values of each head, all of products of its own."""
    x, latent, k_rope, w_q, w_kv = args
    found = []
    for own_q, own_kv in zip(w_q.chunk(N, 1), w_kv.chunk(N, 1), strict=True):
        k, v = (latent @ own_kv).split([P, own_kv.shape[1] - P], -1)
        found.append((x @ own_q, torch.cat([k, k_rope], -1), v))
    return found


def loop(attend: Attend, join: Callable[[list[Tensor]], Tensor]) -> Function:
    return lambda *args: join([attend(*head) for head in heads(args)])


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_heads_of_one_latent_are_one_attention(attend: Attend, join: Callable[[list[Tensor]], Tensor]) -> None:
    function = loop(attend, join)
    check_rewritten(function, mla.tensors())
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert [outcome.shapes[name] for name in "NLPR"] == [str(N), str(L), str(P), str(R)]


@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_sizes_may_be_symbols(attend: Attend) -> None:
    check_rewritten(loop(attend, JOINS["cat of columns"]), mla.tensors(), UNKNOWN)


@pytest.mark.parametrize("apart", ["q", "k", "v"])
def test_whole_keys_of_heads_may_be_stacked(apart: str) -> None:
    """Also in another order of the joins than queries or values: of heads first, or of columns."""

    def attention(*args: Tensor) -> Tensor:
        stacked = {name: torch.stack(each, 1) for name, each in zip("qkv", zip(*heads(args), strict=True), strict=True)}
        whole = dict(zip("qkv", mla.naive(*args), strict=True))
        return mla.sealed(*(stacked | {name: whole[name] for name in "qkv" if name == apart}).values())

    check_rewritten(attention, mla.tensors())


def changed(change: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Function:
    """Heads whose outputs are given by `change` of their number and operands."""
    return lambda *args: torch.cat([change(i, *head) for i, head in enumerate(heads(args))], -1)


APART: dict[str, Function] = {
    "a scale of each": changed(lambda i, q, k, v: (q @ k.mT * SCALE * (1 + i)).softmax(-1) @ v),
    "a mask of each": changed(lambda i, q, k, v: by_hand(q, k[:, : T - i], v[:, : T - i])),
    "one is changed": changed(lambda i, q, k, v: by_hand(q, k, v).relu() if i == 1 else by_hand(q, k, v)),
    "a number on one": changed(lambda i, q, k, v: by_hand(q, k, v) * (1.5 if i == 1 else 1.0)),
    "parts of outputs": changed(lambda i, q, k, v: by_hand(q, k, v)[..., 1:]),
    "one output twice": lambda *args: torch.cat([by_hand(*heads(args)[i]) for i in (0, 1, 1)], -1),
    "queries of the head before": lambda *args: _in_turn(heads(args)),
}


def _in_turn(of_each: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    found = list[Tensor]()
    for q, k, v in of_each:
        found.append(by_hand(q if not found else q + found[-1].mean(-1, keepdim=True), k, v))
    return torch.cat(found, -1)


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_what_differs_in_more_than_operands_is_an_attention_each(function: Function) -> None:
    for path, module, outcomes in compiled(function, mla.tensors(), paths=("absorbed",)):
        assert {(outcome.path, outcome.shapes["N"]) for outcome in outcomes} == {(path, "1")}
        assert len(outcomes) > 1
        assert not unfolded(module)


def test_a_head_that_something_else_reads_is_an_attention_by_itself() -> None:
    def attention(*args: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [by_hand(*head) for head in heads(args)]
        return torch.cat(outputs, -1), outputs[0].sum()

    captured = capture(attention, *mla.tensors())
    before = run(captured, *mla.tensors())
    outcomes = rewrite(captured)
    assert [outcome.shapes["N"] for outcome in outcomes] == ["1"] * N
    for mine, theirs in zip(run(captured, *mla.tensors()), before, strict=True):
        check_right(theirs, mine)


def test_heads_with_latents_of_their_own_stay_apart() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        latents = latent, latent.sin(), latent.cos(), latent.tanh()
        own = [heads((x, latents[i % 4], k_rope, w_q, w_kv))[i] for i in range(N)]
        return torch.cat([by_hand(*head) for head in own], -1)

    for path, _, outcomes in compiled(attention, mla.tensors(), paths=("absorbed",)):
        assert [(outcome.path, outcome.shapes["N"]) for outcome in outcomes] == [(path, "1")] * N


def test_keys_of_rolled_heads() -> None:
    """Heads of the keys in another order are weights in that order."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return by_hand(q, torch.cat([k[:, 2:], k[:, :2]], 1), v)

    check_rewritten(attention, mla.tensors())
