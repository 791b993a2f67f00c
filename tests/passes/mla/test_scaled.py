"""Keys, rope part included, times factors that are the same for all keys: these multiply the queries instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.spellings import B, Function, N, P, R, T


def keys(change: Function, attend: Function = mla.softmax) -> Function:
    """MLA with `change` applied to its whole keys."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return attend(q, change(k), v)

    return attention


def ropes(change: Function) -> Function:
    """MLA with `change` applied to its rope keys after they are expanded to all heads."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k_nope, v = mla.up_projected(latent, w_kv)
        return mla.sealed(mla.queries(x, w_q), torch.cat([k_nope, change(mla.to_heads(k_rope))], -1), v)

    return attention


def ramp(*shape: int) -> Tensor:
    return 0.5 + torch.arange(torch.Size(shape).numel()).view(shape).double() / torch.Size(shape).numel()


REWRITTEN: dict[str, Function] = {
    "a number a head": keys(lambda k: k * ramp(N, 1, 1)),
    "a number a head, sealed": keys(lambda k: k * ramp(N, 1, 1), mla.sealed),
    "divided by a number a head": keys(lambda k: k / ramp(N, 1, 1)),
    "a number a column": keys(lambda k: k * ramp(P + R)),
    "a number a head and column, then a number": keys(lambda k: ramp(N, 1, P + R) * k * 0.3),
    "a number a sequence": keys(lambda k: k * ramp(B, 1, 1, 1)),
    "two of them": keys(lambda k: (k * ramp(N, 1, 1)) / ramp(B, 1, 1, 1), mla.sealed),
    "a number a head, of rope keys": ropes(lambda k: k * ramp(N, 1, 1)),
    "a number a head and column, of rope keys": ropes(lambda k: k * ramp(N, 1, R)),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_what_keys_are_multiplied_by_goes_to_the_query(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def test_a_number_of_each_head_and_key_belongs_to_the_scores() -> None:
    function = keys(lambda k: k * ramp(N, T, 1), mla.sealed)
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"
        assert "found keys that are each multiplied by a number, `" in outcome.reason


def test_factors_that_are_on_the_scores_are_rewritten() -> None:
    """What the report of factors on the keys says to write instead."""
    for path, _, (outcome,) in compiled(
        lambda *a: mla.softmax(*mla.naive(*a), lambda s: s * ramp(N, 1, T)), mla.tensors()
    ):
        assert outcome.path == path


def test_a_number_that_became_a_tensor_is_on_the_scores() -> None:
    """As torch writes a scale that is a symbol, under `dynamic=True`."""

    def attention(x: Tensor, *args: Tensor) -> Tensor:
        def scaled(scores: Tensor) -> Tensor:
            return torch.ops.prims.convert_element_type(scores * x[0, 0, 0].to(torch.float32), scores.dtype)

        return mla.softmax(*mla.naive(x, *args), scaled)

    check_rewritten(attention, mla.tensors())


UNCHANGED: dict[str, Function] = {
    "a number over keys": keys(lambda k: ramp(N, 1, 1) / k),
}


OF_EACH_HEAD: dict[str, Function] = {
    "a number a head and rope key": ropes(lambda k: k * ramp(N, T, 1)),
    "a sum with a number a head": ropes(lambda k: k + ramp(N, T, 1)),
}


@pytest.mark.parametrize("function", OF_EACH_HEAD.values(), ids=OF_EACH_HEAD)
def test_what_makes_rope_keys_those_of_each_head_is_right_on_both_paths(function: Function) -> None:
    for path, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == path


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_a_number_divided_by_keys_stays_as_it_is(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"
