"""Latents that are up-projected separately and then concatenated: one up-projection of the concatenated latents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.spellings import Function, T

CUT = 4


def cached(latent: Tensor) -> tuple[Tensor, Tensor]:
    """The latents of earlier and later tokens; no tensor of the graph has both."""
    return latent[:, :CUT].cos(), latent[:, CUT:] * 2


def in_parts(parts: Callable[[Tensor], tuple[Tensor, ...]], weights: Function = lambda w: (w,) * 9) -> Function:
    """Nope keys and values are computed for each part and concatenated; the rope key is joined afterwards."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        pairs = zip(parts(latent), weights(w_kv), strict=False)
        k, v = (torch.cat(each, 2) for each in zip(*(mla.up_projected(*pair) for pair in pairs), strict=True))
        return mla.sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)

    return attention


def whole_keys(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Each part has its keys joined with its rope keys before the parts are concatenated."""
    ropes = k_rope[:, :CUT].sin(), k_rope[:, CUT:] / 2
    pairs = zip(cached(latent), ropes, strict=True)
    parts = [mla.naive(x, part, rope, w_q, w_kv)[1:] for part, rope in pairs]
    return mla.softmax(mla.queries(x, w_q), *(torch.cat(each, 2) for each in zip(*parts, strict=True)))


def with_biases(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    bias = torch.arange(w_kv.shape[1]).double() / 50
    parts = [(part @ w_kv + bias).unflatten(-1, (mla.N, -1)).transpose(1, 2) for part in cached(latent)]
    k, v = torch.cat(parts, 2).split([mla.P, mla.V], -1)
    return mla.softmax(mla.queries(x, w_q)[..., : mla.P], k, v)


REWRITTEN: dict[str, Function] = {
    "two tensors": in_parts(cached),
    "keys with rope of two tensors": whole_keys,
    "two tensors and a bias": with_biases,
    "three tensors": in_parts(lambda c: (c[:, :2].cos(), c[:, 2:7], c[:, 7:].sin())),
    "many tokens and a new one": in_parts(lambda c: (c[:, : T - 1], c[:, T - 1 :].sin())),
    "a token before many": in_parts(lambda c: (c[:, :1].sin(), c[:, 1:])),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_one_up_projection_of_joined_latents(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def test_sizes_that_are_not_known() -> None:
    check_rewritten(in_parts(lambda c: (c.cos(), c * 2)), (*mla.tensors()[:2], *twice()), mla.UNKNOWN)


def twice() -> tuple[Tensor, ...]:
    _, _, k_rope, w_q, w_kv = mla.tensors()
    return torch.cat([k_rope, k_rope.cos()], 1), w_q, w_kv


UNCHANGED: dict[str, Function] = {
    "other weights": in_parts(cached, lambda w: (w, w.roll(1, 1))),
    "a part that is no up-projection": in_parts(lambda c: (c[:, :CUT], c[:, CUT:].cumsum(1)), lambda w: (w, w.tanh())),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_parts_with_a_weight_each_are_no_up_projection(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"


def test_values_of_parts_in_another_order_than_keys() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        parts = [mla.up_projected(part, w_kv) for part in cached(latent)]
        k, v = torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in reversed(parts)], 2)
        return mla.softmax(mla.queries(x, w_q)[..., : mla.P], k, v)

    outcomes = {path: outcome for path, _, (outcome,) in compiled(attention, mla.tensors())}
    assert [(path, o.path) for path, o in outcomes.items()] == [("absorbed", "absorbed"), ("chunked", "chunked")]
    assert outcomes["absorbed"].shapes["Lk"] == outcomes["absorbed"].shapes["L"]
