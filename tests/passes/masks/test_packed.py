"""Sequences packed into one row: rewritten and right, however their mask is computed from `cu_seqlens`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import Function, T

STARTS = torch.tensor([0, 3, 7, T], dtype=torch.int32)
"""`cu_seqlens`: where each sequence begins, and where the last one ends."""


def tensors() -> tuple[Tensor, ...]:
    return (*mla.tensors(batch=1, queries=T), STARTS)


def token(n: int) -> Tensor:
    return torch.arange(n)


SEQUENCES: dict[str, Function] = {
    "repeat_interleave": lambda cu, n: torch.repeat_interleave(token(len(cu) - 1), cu.diff().long(), output_size=n),
    "searchsorted": lambda cu, n: torch.searchsorted(cu, token(n).int(), right=True) - 1,
    "bucketize": lambda cu, n: torch.bucketize(token(n).int(), cu, right=True) - 1,
    "cumsum of starts": lambda cu, n: torch.zeros(n).long().index_fill(0, cu[1:-1].long(), 1).cumsum(0),
    "cumsum of scattered starts": lambda cu, n: torch.zeros(n).long().scatter(0, cu[1:-1].long(), 1).cumsum(0),
    "starts that are counted": lambda cu, n: (token(n)[:, None] >= cu[None, 1:]).sum(-1),
    "positions that restart": lambda cu, n: (positions(cu, n).diff(prepend=torch.full((1,), -1)) != 1).cumsum(-1),
}
"""Ways to compute the index of each token's sequence; the last is that of transformers, from `position_ids`."""


def positions(cu: Tensor, n: int) -> Tensor:
    """The position of each token in its sequence."""
    return token(n) - cu[SEQUENCES["searchsorted"](cu, n)]


def same(cu: Tensor, n: int, sequences: Function = SEQUENCES["searchsorted"]) -> Tensor:
    sequence = sequences(cu, n)
    return sequence[:, None] == sequence


def causal(n: int) -> Tensor:
    return token(n)[:, None] >= token(n)


def between(cu: Tensor, n: int) -> Tensor:
    sequence = SEQUENCES["searchsorted"](cu, n)
    return (token(n) >= cu[sequence][:, None]) & (token(n) < cu[sequence + 1][:, None])


def of_some_block(cu: Tensor, n: int) -> Tensor:
    inside = (token(n) >= cu[:-1, None]) & (token(n) < cu[1:, None])
    return (inside[:, :, None] & inside[:, None]).any(0)


MASKS: dict[str, tuple[Function, str]] = {
    "one sequence": (same, "tensor"),
    "one sequence, tril": (lambda cu, n: same(cu, n).tril(), "causal + tensor"),
    "one sequence, causal by positions": (
        lambda cu, n: same(cu, n) & (positions(cu, n)[:, None] >= positions(cu, n)),
        "causal + tensor",
    ),
    "a window of a sequence": (
        lambda cu, n: same(cu, n) & causal(n) & (token(n)[:, None] - token(n) < 2),
        "causal + window + tensor",
    ),
    "from start to end": (between, "causal + window"),
    "from the start": (lambda cu, n: between(cu, n) & causal(n), "causal + window"),
    "blocks that are joined": (of_some_block, "tensor"),
    **{
        f"sequences by {name}": (lambda cu, n, make=make: same(cu, n, make) & causal(n), "causal + tensor")
        for name, make in SEQUENCES.items()
    },
}


def sdpa(seen: Function) -> Function:
    return lambda *args: mla.sealed(*mla.naive(*args[:-1]), seen(args[-1], args[0].shape[1])[None, None])


def added(seen: Function) -> Function:
    def attention(*args: Tensor) -> Tensor:
        mask = torch.zeros(()).double().masked_fill(~seen(args[-1], args[0].shape[1]), -torch.inf)
        return mla.softmax(*mla.naive(*args[:-1]), lambda scores: scores + mask)

    return attention


@pytest.mark.diagonal
@pytest.mark.parametrize("symbolic", [(), [(1,), (1,), (1,)]], ids=["static", "symbolic"])
@pytest.mark.parametrize("attend", [sdpa, added])
@pytest.mark.parametrize(("seen", "words"), MASKS.values(), ids=MASKS)
def test_both_paths_are_taken_and_right(seen: Function, words: str, attend: Function, symbolic: list) -> None:
    for path, _, (outcome,) in compiled(attend(seen), tensors(), symbolic):
        assert (outcome.path, outcome.mask) == (path, words)


def test_tokens_without_a_batch() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, cu: Tensor) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in mla.naive(x, latent, k_rope, w_q, w_kv))  # [tokens, N, width]
        scores = torch.einsum("qnd,knd->nqk", q, k) * mla.SCALE
        scores = scores.masked_fill(~(same(cu, len(q)) & causal(len(q))), -torch.inf)
        return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v)

    for path, _, (outcome,) in compiled(attention, tensors()):
        assert (outcome.path, outcome.mask) == (path, "causal + tensor")


def test_each_sequence_by_itself() -> None:
    def attention(*args: Tensor) -> Tensor:
        parts = zip(*(t.split([3, 4, T - 7], 2) for t in mla.naive(*args[:-1])), strict=True)
        return torch.cat([mla.sealed(*part, causal=True) for part in parts], 2)

    for path, _, outcomes in compiled(attention, tensors()):
        assert [(o.path, o.mask) for o in outcomes] == [(path, "causal")] * 3


def test_sequences_that_are_padded_to_the_longest_and_back() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, cu: Tensor) -> Tensor:
        place = SEQUENCES["searchsorted"](cu, T), positions(cu, T)
        rows = [t.new_zeros(3, 4, t.shape[-1]).index_put(place, t[0]) for t in (x, latent, k_rope)]
        seen = (token(4) < cu.diff()[:, None])[:, None, None] & causal(4)
        return mla.sealed(*mla.naive(*rows, w_q, w_kv), seen).transpose(1, 2)[place]

    for path, _, (outcome,) in compiled(attention, tensors()):
        assert (outcome.path, outcome.mask) == (path, "causal + lengths")
