"""Attention in loops over sequences or heads: found as one attention, or left unchanged if the pieces are not one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, L, N, P, R, T, V


def one_by_one(count: int, dim: int, product: Function, *, buffer: bool) -> Tensor:
    """A tensor that has `product(i)` at index i of `dim`; the pieces are stacked or written to a buffer."""
    pieces = [product(i) for i in range(count)]
    if not buffer:
        return torch.stack(pieces, dim)
    shape = list(pieces[0].shape)
    shape.insert(dim, count)
    whole = pieces[0].new_empty(shape)
    for i, piece in enumerate(pieces):
        whole.select(dim, i).copy_(piece)
    return whole


def in_loops(*, scores: bool, values: bool, buffer: bool, heads: bool) -> Function:
    """Scores, values or both are multiplied sequence by sequence or head by head; there is one softmax."""
    count, dim = (N, 1) if heads else (B, 0)

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        s = q @ k.mT
        if scores:
            s = one_by_one(count, dim, lambda i: q.select(dim, i) @ k.select(dim, i).mT, buffer=buffer)
        w = (s * SCALE).softmax(-1)
        if not values:
            return w @ v
        return one_by_one(count, dim, lambda i: w.select(dim, i) @ v.select(dim, i), buffer=buffer)

    return attention


def in_two_loops(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    scores, o = q.new_empty(B, N, SQ, T), q.new_empty(B, N, SQ, V)
    for b in range(B):
        for n in range(N):
            scores[b, n] = q[b, n] @ k[b, n].mT
    w = (scores * SCALE).softmax(-1)
    for b in range(B):
        for n in range(N):
            o[b, n] = w[b, n] @ v[b, n]
    return o


def two_scores_in_a_loop(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    k_nope, v = mla.up_projected(latent, w_kv)
    scores = torch.stack([q_nope[b] @ k_nope[b].mT + q_rope[b] @ k_rope[b].mT for b in range(B)])
    return (scores * SCALE).softmax(-1) @ v


def up_projected_in_a_loop(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys and values are computed for each sequence, and then concatenated."""
    keys, values = [], []
    for b in range(B):
        k_nope, v = mla.up_projected(latent[b : b + 1], w_kv)
        keys.append(torch.cat([k_nope, mla.to_heads(k_rope[b : b + 1])], -1))
        values.append(v)
    return mla.softmax(mla.queries(x, w_q), torch.cat(keys), torch.cat(values))


def absorbed_in_a_loop(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Queries are absorbed by hand; latent and rope key are written to a buffer with all heads."""
    w_uk, _ = mla.weights(w_kv)
    _, v = mla.up_projected(latent, w_kv)
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    q = torch.cat([q_nope @ w_uk, q_rope], -1)
    k = q.new_empty(B, N, T, L + R)
    k[..., :L] = latent[:, None]
    k[..., L:] = k_rope[:, None]
    scores = torch.stack([q[b] @ k[b].mT for b in range(B)])
    return (scores * SCALE).softmax(-1) @ v


def test_a_loop_of_half_absorbed_attention_is_absorbed() -> None:
    for _, _, (outcome,) in compiled(absorbed_in_a_loop, mla.tensors()):
        assert outcome.path == "absorbed"


LOOPS: dict[str, Function] = {
    f"{what} of {'heads' if heads else 'sequences'}{' in a buffer' * buffer}": in_loops(
        scores=what != "values", values=what != "scores", buffer=buffer, heads=heads
    )
    for what in ("scores", "values", "products")
    for heads in (False, True)
    for buffer in (False, True)
} | {
    "sequences and heads": in_two_loops,
    "two scores": two_scores_in_a_loop,
    "up-projections": up_projected_in_a_loop,
}


@pytest.mark.parametrize("function", LOOPS.values(), ids=LOOPS)
def test_a_loop_is_one_attention(function: Function) -> None:
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize("values", [False, True], ids=["scores", "products"])
def test_a_loop_over_heads_of_an_unknown_number_of_sequences_is_one_attention(values: bool) -> None:
    """Each head is written to a slice of all sequences."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores, o = q.new_zeros(q.shape[0], N, SQ, T), q.new_zeros(q.shape[0], N, SQ, V)
        for n in range(N):
            scores[:, n] = torch.bmm(q[:, n], k[:, n].mT)
        w = (scores * SCALE).softmax(-1)
        if not values:
            return w @ v
        for n in range(N):
            o[:, n] = torch.bmm(w[:, n], v[:, n])
        return o

    check_rewritten(attention, mla.tensors(), symbolic=[(0,), (0,), (0,)])


def values_of_others(change: Callable[[Tensor, Tensor, int], Tensor]) -> Function:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        w = (q @ k.mT * SCALE).softmax(-1)
        return torch.stack([change(w, v, b) for b in range(B)])

    return attention


LOOSE: dict[str, Function] = {
    "a factor a sequence": values_of_others(lambda w, v, b: w[b] @ v[b] * (b + 1)),
    "a gap": values_of_others(lambda w, v, b: w[b] @ v[b] if b else torch.zeros(N, SQ, V).double()),
}
"""Pieces that are not parts of one product: each is an attention."""


@pytest.mark.parametrize("function", LOOSE.values(), ids=LOOSE)
def test_pieces_of_no_one_attention_are_one_each(function: Function) -> None:
    for path, module, outcomes in compiled(function, mla.tensors()):
        assert {outcome.path for outcome in outcomes} == {path}
        assert not unfolded(module)


def test_weights_of_another_sequence_than_the_values_are_none_of_mla() -> None:
    function = values_of_others(lambda w, v, b: w[0] @ v[b])
    for _, _, outcomes in compiled(function, mla.tensors(), paths=["absorbed"]):
        assert [outcome.path for outcome in outcomes] == ["unchanged"]
        assert "expected values that are an up-projection of a latent" in outcomes[0].reason


def test_values_of_other_sequences_have_another_latent_than_the_keys() -> None:
    for path, _, (outcome,) in compiled(values_of_others(lambda w, v, b: w[b] @ v[B - 1 - b]), mla.tensors()):
        assert outcome.path == path
        assert outcome.shapes["Lk"] == str(L)


def test_a_piece_that_is_read_besides_is_an_attention_too() -> None:
    def attention(*args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = mla.naive(*args)
        w = (q @ k.mT * SCALE).softmax(-1)
        pieces = [w[b] @ v[b] for b in range(B)]
        return torch.stack(pieces), pieces[1]

    captured = capture(attention, *mla.tensors())
    before = run(captured, *mla.tensors())
    assert [outcome.path for outcome in rewrite(captured)] == ["absorbed", "absorbed"]
    assert not unfolded(captured)
    for mine, theirs in zip(run(captured, *mla.tensors()), before, strict=True):
        check_right(theirs, mine)
