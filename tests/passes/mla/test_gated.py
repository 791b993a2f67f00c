"""Keys and values multiplied by one factor per key: the latent times this factor is the latent of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import Function, N, P, R, T, V, sealed


def gate(latent: Tensor) -> Tensor:
    """One number per key, `[B, T]`."""
    return latent[..., 0].sigmoid()


def norm(latent: Tensor) -> Tensor:
    return latent.pow(2).mean(-1).add(1e-6).rsqrt()


def gated(
    factor: Function = gate,
    *,
    keys: Function = lambda k, g: k * g,
    values: Function = lambda v, g: v * g,
    whole: bool = False,
    attend: Function = sealed,
) -> Function:
    """MLA whose nope keys, or `whole` keys with the rope key, and values are multiplied by one factor per key."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        g = factor(latent)[:, None, :, None]
        k, v = mla.up_projected(latent, w_kv)
        rope = mla.to_heads(k_rope)
        k = keys(torch.cat([k, rope], -1), g) if whole else torch.cat([keys(k, g), rope], -1)
        return attend(mla.queries(x, w_q), k, values(v, g))

    return attention


def together(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The up-projected keys and values of all heads are gated before they are split into heads."""
    kv = (latent @ w_kv) * gate(latent)[..., None]
    k, v = kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], -1)
    return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)


GATED: dict[str, Callable[..., Tensor]] = {
    "a gate": gated(),
    "a gate before heads are split off": together,
    "a gate of all of the keys": gated(whole=True),
    "a norm of the latent, after it": gated(norm),
    "a divisor": gated(keys=lambda k, g: k / g, values=lambda v, g: v / g),
    "two factors": gated(keys=lambda k, g: k * g * g.exp(), values=lambda v, g: v * g * g.exp()),
    "the factor first": gated(keys=lambda k, g: g * k, values=lambda v, g: g * v),
    "softmax by hand": gated(attend=mla.softmax),
    "a factor, then a number": gated(keys=lambda k, g: k * g * 0.5, values=lambda v, g: v * g),
    "a factor, then a number on all of the keys": lambda *args: gated(attend=lambda q, k, v: sealed(q, k * 0.5, v))(
        *args
    ),
    "a factor of each sequence": gated(lambda c: c[:, :1, 0].expand(-1, T)),
    "a factor a head on the values": gated(
        keys=lambda k, _: k, values=lambda v, _: v * torch.arange(1, N + 1).double()[:, None, None]
    ),
}


def mixed(mix: Function) -> Function:
    """`mix` of two up-projections of the latent and a gate `[B, 1, T, 1]`, for the keys and for the values."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        pairs = zip(mla.up_projected(latent, w_kv), mla.up_projected(latent, w_kv.flip(0)), strict=True)
        k, v = (mix(*pair, gate(latent)[:, None, :, None]) for pair in pairs)
        return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)

    return attention


MIXED: dict[str, Function] = {
    "lerp": mixed(torch.lerp),
    "lerp back": mixed(lambda a, b, g: torch.lerp(b, a, g)),
    "addcmul": mixed(torch.addcmul),
    "addcmul, the factor first": mixed(lambda a, b, g: torch.addcmul(a, g, b, value=-0.5)),
    "addcmul to a multiple": mixed(lambda a, b, g: torch.addcmul(a * g, b, g.exp(), value=2)),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_two_up_projections_are_mixed_by_a_factor(function: Function) -> None:
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize("function", GATED.values(), ids=GATED)
def test_a_factor_of_keys_and_values_goes_to_the_latent(function: Function) -> None:
    check_rewritten(function, mla.tensors())


APART: dict[str, Function] = {
    "values alone": gated(keys=lambda k, _: k),
    "keys alone": gated(values=lambda v, _: v),
    "all of the keys alone": gated(values=lambda v, _: v, whole=True, attend=mla.softmax),
    "keys of the first tokens alone": gated(
        lambda c: torch.arange(c.shape[1]).expand(len(c), -1) < 4, values=lambda v, _: v
    ),
    "another factor": gated(values=lambda v, g: v * g.exp()),
    "divided by what the keys are multiplied by": gated(values=lambda v, g: v / g),
    "the factor of the key before": gated(values=lambda v, g: v * g.roll(1, 2)),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_a_factor_of_one_of_them_alone_makes_a_latent_of_its_own(function: Function) -> None:
    for path in ("absorbed", "chunked"):
        module = capture(function, *mla.tensors())
        before = run(module, *mla.tensors())
        (outcome,) = rewrite(module, path)
        assert outcome.path == path
        assert outcome.shapes["Lk"] == outcome.shapes["L"]
        check_right(before, run(module, *mla.tensors()))


def normed_keys(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One norm for the keys of all heads: to compute it takes all of them."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    k_nope, k_rope = k.split([P, R], -1)
    k_nope = k_nope * (k_nope.square().mean((1, 3), keepdim=True) + 1e-6).rsqrt()
    return sealed(q, torch.cat([k_nope, k_rope], -1), v)


UNCHANGED: dict[str, tuple[Function, str]] = {
    "keys alone, by a norm": (normed_keys, "computed from it as in a norm"),
    "by a mixture of each column": (mixed(lambda a, b, _: torch.lerp(a, b, a)), "found `lerp"),
    "squared": (gated(keys=lambda k, _: k * k, values=lambda v, _: v * v), "computed from it as in a norm"),
    "a factor of each key and head": (
        gated(
            keys=lambda k, _: F.normalize(k, dim=-1),
            values=lambda v, _: F.normalize(v, dim=-1),
        ),
        "computed from it as in a norm",
    ),
}
"""What the factor is made of takes the product."""


@pytest.mark.parametrize(("function", "reason"), UNCHANGED.values(), ids=UNCHANGED)
def test_a_near_miss_stays_as_it_is(function: Function, reason: str) -> None:
    (outcome,) = rewrite(capture(function, *mla.tensors()))
    assert outcome.path == "unchanged"
    assert reason in outcome.reason


def turned(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Each token's keys are turned by one angle: the sum of two linear maps, each with a gate."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    k_nope, k_rope = k.split([P, R], -1)
    angle = latent[:, None, :, :1]
    other = torch.cat([-k_nope[..., P // 2 :], k_nope[..., : P // 2]], -1)
    return sealed(q, torch.cat([k_nope * angle.cos() + other * angle.sin(), k_rope], -1), v)


def test_gates_of_a_sum_are_gates_of_its_addends() -> None:
    for path, _, (outcome,) in compiled(turned, mla.tensors(), paths=["absorbed"]):
        assert outcome.path == path
