"""Keys, rope part included, times factors that are the same for all keys: these multiply the queries instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
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


def test_a_norm_of_whole_keys_belongs_to_the_latent() -> None:
    """As a factor of the scores it would take all up-projected keys, at every step."""
    function = keys(lambda k: k * k.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), mla.sealed)
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"
        assert ", which is computed from them as in a norm, at `" in outcome.reason
        assert outcome.remedy.startswith("norm the latent before the up-projection")


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


def absorbed(change: Function, values: Function = lambda latent: latent) -> Function:
    """MLA that is absorbed by hand over latents that are an input, as from a cache. `change` is applied to its scores
    and to `scale`, a number in a tensor."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, scale: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        latent, k_rope, w_uk, w_uv = (t.to(x.dtype) for t in (latent, k_rope, w_uk, w_uv))
        scores = q_nope @ w_uk @ latent[:, None].mT + q_rope @ k_rope[:, None].mT
        return change(scores, scale).softmax(-1) @ values(latent)[:, None] @ w_uv.mT

    return attention


def with_scale() -> tuple[Tensor, ...]:
    return *mla.tensors(), torch.tensor(mla.SCALE, dtype=torch.float64)


NUMBERS: dict[str, Function] = {
    "a number": absorbed(lambda s, scale: s * scale),
    "a number before the scores": absorbed(lambda s, scale: scale * s),
    "of one element": absorbed(lambda s, scale: s * scale.view(1)),
    "of one element a dimension": absorbed(lambda s, scale: s * scale.view(1, 1, 1, 1)),
    "computed": absorbed(lambda s, scale: s * scale.square().rsqrt()),
    "two of them, and a number": absorbed(lambda s, scale: s * scale * 0.5 * scale.sqrt()),
    "divided by another": absorbed(lambda s, scale: s * scale / scale.sqrt()),
    "before a mask": absorbed(lambda s, scale: (s * scale).masked_fill(torch.arange(T) > T // 2, -torch.inf)),
    "of scores with a bias": absorbed(lambda s, scale: (s + ramp(T)) * scale),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_a_number_in_a_tensor_goes_to_queries_that_are_absorbed_by_hand(function: Function) -> None:
    for _, module, (outcome,) in compiled(function, with_scale()):
        assert (outcome.path, outcome.reason) == ("absorbed", "attends to the latent already: absorbed by hand")
        assert not unfolded(module)


def test_a_number_in_a_tensor_where_sizes_are_not_known() -> None:
    for _, _, (outcome,) in compiled(NUMBERS["a number"], with_scale(), mla.UNKNOWN):
        assert outcome.reason == "attends to the latent already: absorbed by hand"


def test_latents_and_rope_keys_in_one_cache() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, scale: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        scores = torch.cat([q_nope @ w_uk, q_rope], -1) @ latent[:, None].mT
        return (scores * scale).softmax(-1) @ latent[:, None, :, : mla.L] @ w_uv.mT

    x, latent, k_rope, *rest = with_scale()
    for _, _, (outcome,) in compiled(attention, (x, torch.cat([latent, k_rope], -1), k_rope, *rest)):
        assert outcome.reason == "attends to the latent already: absorbed by hand"


def test_a_number_of_scores_over_a_cache_in_int8() -> None:
    x, latent, *rest = with_scale()
    tensors = x, (latent * 30).round().to(torch.int8), *rest[:-1], rest[-1] / 30
    for _, _, (outcome,) in compiled(NUMBERS["a number"], tensors):
        assert outcome.reason == "attends to the latent already: absorbed by hand"


def test_a_number_in_float32_beside_queries_in_bfloat16() -> None:
    """The error is at most twice that of the graph before the passes: scores are rounded, or queries."""
    *tensors, scale = with_scale()
    halves, scale = [t.bfloat16() for t in tensors], scale.float()
    module = capture(NUMBERS["a number"], *halves, scale)
    wide = [t.double() for t in (*halves, scale)]
    exact = run(capture(NUMBERS["a number"], *wide), *wide)
    before = (run(module, *halves, scale).double() - exact).abs().max()
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    after = run(module, *halves, scale)
    assert after.dtype == torch.bfloat16
    assert (after.double() - exact).abs().max() <= 2 * before


def test_a_number_of_each_key_stays_with_keys_that_are_absorbed_by_hand() -> None:
    """A matrix of latents, which are both keys and values: only the keys are multiplied."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, scale: Tensor) -> Tensor:
        q = x[0] @ w_q[:, : mla.L]
        return ((q @ latent.T) * scale).softmax(-1) @ latent

    x, latent, *rest, _ = with_scale()
    for _, _, (outcome,) in compiled(attention, (x, latent[0], *rest, ramp(T))):
        assert outcome.path == "unchanged"


def test_values_that_are_no_latent_stay() -> None:
    function = absorbed(lambda s, scale: s * scale, lambda latent: latent * ramp(T, 1))
    for _, _, (outcome,) in compiled(function, with_scale()):
        assert outcome.path == "unchanged"
