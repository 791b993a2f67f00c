"""Masks that are put on the scores of some of the keys alone, as on those of the present tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled, unfolded
from tests.passes.spellings import SCALE, SQ, Function, T


def causal(s: int) -> Tensor:
    """What is added to the scores of the present tokens: 0 up to a query's own, -inf behind it."""
    return torch.full((s, s), -math.inf, dtype=torch.float64).triu(1)


def hidden(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def changed(change: Function) -> Function:
    """Attention whose scores `[B, N, Sq, T]` become `change(scores, Sq)`."""

    def attention(x: Tensor, *args: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(x, *args), lambda scores: change(scores, x.shape[1]))

    return attention


def in_place(w: Tensor, s: int) -> Tensor:
    w[:, :, :, -s:] += causal(s)
    return w


def written(w: Tensor, s: int) -> Tensor:
    w[..., -s:] = w[..., -s:] + causal(s)
    return w


def written_by_index(w: Tensor, s: int) -> Tensor:
    t = w.shape[-1]
    return w.index_copy(-1, torch.arange(t - s, t), w[..., -s:] + causal(s))


def joined(w: Tensor, s: int) -> Tensor:
    return torch.cat([w[..., :-s], w[..., -s:] + causal(s)], -1)


def filled(w: Tensor, s: int) -> Tensor:
    w[..., -s:].masked_fill_(hidden(s), -math.inf)
    return w


def chosen(w: Tensor, s: int) -> Tensor:
    return torch.cat([w[..., :-s], torch.where(~hidden(s), w[..., -s:], -math.inf)], -1)


def scaled_afterwards(w: Tensor, s: int) -> Tensor:
    return 2 * joined(w / 2, s)


def in_two_steps(w: Tensor, s: int) -> Tensor:
    """Each query's own key and those before it are allowed, the rest is hidden from one side after the other."""
    w = torch.cat([w[..., : 1 - s], w[..., 1 - s :].masked_fill(hidden(s)[:, 1:], -math.inf)], -1)
    return torch.cat([w[..., :2], w[..., 2:]], -1)


CAUSAL: dict[str, Function] = {
    function.__name__: function
    for function in (
        in_place, written, written_by_index, joined, filled, chosen, scaled_afterwards, in_two_steps
    )
}  # fmt: skip


@pytest.mark.parametrize("change", CAUSAL.values(), ids=CAUSAL)
def test_a_causal_mask_of_the_last_keys(change: Function) -> None:
    """Keys before these are seen by all queries, as the limit of all keys says."""
    for path, module, (outcome,) in compiled(changed(change), mla.tensors()):
        assert (outcome.path, outcome.mask) == (path, "causal")
        assert not unfolded(module)


@pytest.mark.parametrize("change", [in_place, joined, filled])
def test_the_only_query_sees_all_keys(change: Function) -> None:
    for path, _, (outcome,) in compiled(changed(change), mla.tensors(queries=1)):
        assert (outcome.path, outcome.mask) == (path, "none")


@pytest.mark.parametrize("change", [in_place, joined, filled])
def test_a_cache_of_any_size(change: Function) -> None:
    def attention(x: Tensor, past: Tensor, past_rope: Tensor, new: Tensor, new_rope: Tensor, *w: Tensor) -> Tensor:
        return changed(change)(x, torch.cat([past, new], 1), torch.cat([past_rope, new_rope], 1), *w)

    x, latent, k_rope, *w = mla.tensors()
    tensors = (x, *latent.split([T - SQ, SQ], 1), *k_rope.split([T - SQ, SQ], 1), *w)
    tensors = (x, tensors[1], tensors[3], tensors[2], tensors[4], *w)
    for path, _, (outcome,) in compiled(attention, tensors, [(0, 1)] * 5):
        assert (outcome.path, outcome.mask) == (path, "causal")


def of_parts(*changes: Function) -> Function:
    """The scores of the first two keys, the next three and all others, changed by one function each."""

    def change(w: Tensor, s: int) -> Tensor:
        return torch.cat([own(part) for own, part in zip(changes, w.split([2, 3, T - 5], -1), strict=True)], -1)

    return changed(change)


def bias(part: Tensor) -> Tensor:
    """A number for each key and query."""
    return part + torch.arange(part.shape[-1]) / (torch.arange(SQ)[:, None] + 1.0)


def odd(part: Tensor, fill: float = -1e9) -> Tensor:
    """Every second key is hidden from every second query."""
    keys, queries = torch.arange(part.shape[-1]), torch.arange(SQ)[:, None]
    return part.masked_fill(keys % 2 + queries % 2 > 1, fill)


def counted(part: Tensor) -> Tensor:
    """0 or 1 for each key and query, int64."""
    return (torch.arange(part.shape[-1]) + torch.arange(SQ)[:, None]) % 2


def as_it_is(part: Tensor) -> Tensor:
    return part


MASKED: dict[str, Function] = {
    "a bias of the first keys": of_parts(bias, as_it_is, as_it_is),
    "a bias of some keys in the middle": of_parts(as_it_is, bias, as_it_is),
    "a bias of each part": of_parts(bias, bias, bias),
    "a number for all of a part": of_parts(as_it_is, lambda w: w + torch.tensor(0.5), as_it_is),
    "a number for each query": of_parts(as_it_is, lambda w: w + torch.arange(SQ)[:, None].double(), as_it_is),
    "hidden by -1e9": of_parts(as_it_is, odd, as_it_is),
    "hidden by -1e9 everywhere": of_parts(*[lambda w: odd(w).masked_fill(torch.arange(SQ)[:, None] == 1, -1e9)] * 3),
    "a bias, then hidden": of_parts(as_it_is, lambda w: odd(bias(w), -math.inf), bias),
    "hidden, then a bias": of_parts(as_it_is, lambda w: bias(w.masked_fill(w.new_ones(3) > 2, -math.inf)), bias),
    "hidden by whole numbers": of_parts(as_it_is, lambda w: w.masked_fill(counted(w).bool(), -math.inf), as_it_is),
    "whole numbers that are cast": of_parts(as_it_is, lambda w: w + counted(w).double() * 0.5, as_it_is),
    "numbers in fewer bits": of_parts(as_it_is, lambda w: w + counted(w).float(), as_it_is),
    "a bias of all keys before": changed(lambda w, s: in_place(bias(w), s)),
    "a bias of all keys after": changed(lambda w, s: bias(in_place(w, s))),
}


@pytest.mark.parametrize("function", MASKED.values(), ids=MASKED)
def test_other_masks_of_parts_of_the_keys(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def of_other_keys(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Two products of the same queries: with the keys of the past, and with those of the present tokens."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    past, new = k.split([T - SQ, SQ], 2)
    return torch.cat([q @ past.mT * SCALE, q @ new.mT * SCALE + causal(SQ)], -1).softmax(-1) @ v


def test_products_with_parts_of_the_keys() -> None:
    for path, _, (outcome,) in compiled(of_other_keys, mla.tensors()):
        assert (outcome.path, outcome.mask) == (path, "causal")


def last(part: Function) -> Function:
    """Scores whose last ones are replaced by `part(scores, Sq)`, with the causal mask added."""
    return changed(lambda w, s: torch.cat([w[..., :-s], part(w, s) + causal(s)], -1))


def every_second(w: Tensor, s: int) -> Tensor:
    w[..., ::2] += 1.5
    return w


def of_queries(w: Tensor, s: int) -> Tensor:
    w[:, :, -1:] += torch.arange(T).double()
    return w


UNCHANGED: dict[str, Function] = {
    "other keys than those that are replaced": last(lambda w, s: w[..., :s]),
    "keys that overlap with the others": last(lambda w, s: w[..., -s - 1 : -1]),
    "keys in another order": last(lambda w, s: w[..., -s:].flip(-1)),
    "another function of the scores": last(lambda w, s: w.sin()[..., -s:]),
    "a multiple of the scores": last(lambda w, s: 2 * w[..., -s:]),
    "scores with a temperature": last(lambda w, s: w[..., -s:] * torch.arange(1, SQ + 1)[:, None].double()),
    "the scores of another head": last(lambda w, s: w.roll(1, 1)[..., -s:]),
    "the scores of another query": last(lambda w, s: w.roll(1, 2)[..., -s:]),
    "the scores of one key": last(lambda w, s: w[..., -1:]),
    "one query before": changed(
        lambda w, s: torch.cat([w[:, :, :1, :-s] + torch.arange(s)[:, None].double(), w[..., -s:]], -1)
    ),
    "other queries": last(lambda w, s: w[:, :, :1, -s:].expand(-1, -1, s, -1)),
    "no scores at all": last(lambda w, s: w.new_zeros(*w.shape[:3], s)),
    "twice the scores": last(lambda w, s: w[..., -s:] + w[..., -s:]),
    "the last keys first": changed(lambda w, s: torch.cat([w[..., -s:] + causal(s), w[..., :-s]], -1)),
    "a number that leaves something of scores": of_parts(
        as_it_is, lambda w: w.masked_fill(w.new_ones(3) > 0, -9.0), as_it_is
    ),
    "numbers that differ": of_parts(odd, lambda w: w.masked_fill(w.new_ones(3) > 0, -1e6), as_it_is),
    "every second key": changed(every_second),
    "the last queries": changed(of_queries),
    "a mask made of the scores": last(lambda w, s: w[..., -s:] + w[..., -s:].relu()),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_what_is_no_mask_of_parts_of_the_keys(function: Function) -> None:
    check_unchanged(function, mla.tensors())
