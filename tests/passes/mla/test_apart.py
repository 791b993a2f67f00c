"""Keys and values with a latent each: few queries attend to both latents; for many, each is up-projected."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_right, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, Function, L, N, P, R, T, V


def attention(
    keys: Function, values: Function, *, rope: bool = True, score: Function = lambda s: s, bias: bool = False
) -> Function:
    """MLA whose keys are up-projected from `keys(latent)` and whose values are up-projected from `values(latent)`."""

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        k = torch.einsum("btl,npl->bntp", keys(latent), w_uk[..., : keys(latent).shape[-1]])
        v = torch.einsum("btl,nvl->bntv", values(latent), w_uv[..., : values(latent).shape[-1]])
        if bias:
            k, v = k + w_uk[:, None, :, 0], v + w_uv[:, None, :, 1]
        q = mla.queries(x, w_q)
        if rope:
            k = torch.cat([k, mla.to_heads(k_rope)], -1)
        else:
            q = q[..., :P]
        return score(q @ k.mT * SCALE).softmax(-1) @ v

    return function


def with_biases_within(*args: Tensor, change: Function = mla.softmax) -> Tensor:
    """A `Linear` with a bias for the keys, another for the values; rope keys in a product of their own."""
    x, latent, k_rope, w_q, w_kv = args
    w_uk, w_uv = (w[..., : L // 2].flatten(0, 1) for w in mla.weights(w_kv))
    k = F.linear(latent[..., : L // 2], w_uk, w_uk[:, 0]).unflatten(-1, (N, P)).transpose(1, 2)
    v = F.linear(latent[..., -(L // 2) :], w_uv, w_uv[:, 1]).unflatten(-1, (N, V)).transpose(1, 2)
    return change(mla.queries(x, w_q), torch.cat([mla.to_heads(k_rope), k], -1), v)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mla.softmax(q, k, v, lambda s: 2 * torch.tanh(s / 2))


def capped_in_two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q[..., :R] @ k[..., :R].mT + q[..., R:] @ k[..., R:].mT
    return (2 * torch.tanh(scores / 2)).softmax(-1) @ v


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * SCALE).softmax(-1)
    return torch.cat([weights @ v, weights], -1)


def turned(latent: Tensor) -> Tensor:
    """A rope on the latent."""
    angle = torch.arange(T).double()[:, None] / 3
    first, second, own = latent[..., : L // 2], latent[..., L // 2 : L // 2 * 2], latent[..., L // 2 * 2 :]
    pair = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat([*pair, own], -1)


def itself(latent: Tensor) -> Tensor:
    return latent


APART: dict[str, Function] = {
    "two latents in one cache": attention(lambda c: c[..., : L // 2], lambda c: c[..., L // 2 :]),
    "two widths": attention(lambda c: c[..., :2], lambda c: c[..., 2:]),
    "without rope": attention(lambda c: c[..., :2], lambda c: c[..., 2:], rope=False),
    "a rope on the keys' latent": attention(turned, itself, rope=False),
    "a norm of the keys' latent": attention(lambda c: F.rms_norm(c, (L,)), itself),
    "values of the token before": attention(itself, lambda c: c.roll(1, 1)),
    "values of the next sequence": attention(itself, lambda c: c.flip(0)),
    "values of a part of the latent": attention(itself, lambda c: c[..., :4]),
    "values of a latent that is changed": attention(itself, lambda c: c * 2 + 1),
    "biases": attention(lambda c: c[..., : L // 2], lambda c: c[..., L // 2 :], bias=True),
    "biases in the projections": with_biases_within,
    "under a soft cap": functools.partial(with_biases_within, change=capped),
    "under a soft cap of two products": functools.partial(with_biases_within, change=capped_in_two_products),
    "under a mask": attention(turned, itself, score=lambda s: s.masked_fill(torch.arange(T) > 4, -torch.inf)),
    "a bias of each head's scores": attention(
        turned, itself, score=lambda s: s - torch.arange(1, N + 1).double()[:, None, None] * torch.arange(T).double()
    ),
}


WITH_WEIGHTS = functools.partial(with_biases_within, change=with_weights)


@pytest.mark.parametrize("function", [*APART.values(), WITH_WEIGHTS], ids=[*APART, "weights that are returned"])
def test_few_queries_attend_to_both(function: Function) -> None:
    traced = capture(function, *mla.tensors())
    before = run(traced, *mla.tensors())
    module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed"
    assert "Lk" in outcome.shapes
    check_right(before, run(module, *mla.tensors()))
    assert not [node for node in unfolded(module) if node.meta["val"].shape[-1] in (P, V, P + R)]


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_for_many_each_is_up_projected(function: Function) -> None:
    traced = capture(function, *mla.tensors())
    before = run(traced, *mla.tensors())
    module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    (outcome,) = rewrite(module, "chunked")
    assert outcome.path == "chunked", outcome.reason
    check_right(before, run(module, *mla.tensors()))


def heads_share(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys that all heads share as they are."""
    v = torch.einsum("btl,nvl->bntv", latent, mla.weights(w_kv)[1])
    return (mla.queries(x, w_q)[..., -R:] @ k_rope[:, None].mT * SCALE).softmax(-1) @ v


def of_three(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys that are up-projected from two latents, neither of which is that of the values."""
    w_uk, w_uv = mla.weights(w_kv)
    k = torch.cat([torch.einsum("btl,npl->bntp", part, w_uk) for part in (latent.sin(), latent.cos())], -1)
    q = mla.queries(x, w_q)[..., :P]
    return (torch.cat([q, q], -1) @ k.mT * SCALE).softmax(-1) @ torch.einsum("btl,nvl->bntv", latent, w_uv)


def test_keys_of_two_latents_stay_as_they_are_for_many_queries() -> None:
    (outcome,) = rewrite(capture(of_three, *mla.tensors()), "chunked")
    assert outcome.path == "unchanged"
    assert "expected keys that are up-projected from one latent for many queries, found keys" in outcome.reason


def test_keys_that_heads_share_are_no_part_of_what_is_up_projected() -> None:
    traced = capture(heads_share, *mla.tensors())
    before = run(traced, *mla.tensors())
    (outcome,) = rewrite(traced, "chunked")
    assert (outcome.path, outcome.shapes["P"], outcome.shapes["R"]) == ("chunked", "0", str(R))
    check_right(before, run(traced, *mla.tensors()))
    assert not unfolded(traced)


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", [APART["two latents in one cache"], heads_share])
def test_on_other_devices_too(function: Function, path: str) -> None:
    (outcome,) = rewrite(capture(function, *(t.to("meta") for t in mla.tensors())), path)
    assert outcome.path == path
