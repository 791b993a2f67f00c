"""Unusual but correct ways to write MLA: each is rewritten, and its result stays right."""

from __future__ import annotations

import math
from collections.abc import Callable

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, L, N, P, R, T, V


def joined(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, change: Function) -> Tensor:
    """MLA whose rope key is `change(k_rope)`, [B, T, R], or [B, N, T, R] with one for each head."""
    k_nope, v = mla.up_projected(latent, w_kv)
    made = change(k_rope)
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(made) if made.dim() == 3 else made], -1), v)


def prefill_and_decode(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One scale for one query, another for many."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    one = mla.sealed(q[:, :, :1], k, v, scale=0.2)
    return torch.cat([one, mla.sealed(q[:, :, 1:], k, v, scale=0.9)], 2)


def unnormed_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The cache holds the output of `kv_a_proj`; norm and rope are applied to all of it at every step."""
    latent = torch.cat([latent[:, SQ:], x[..., :L]], 1)
    angle = torch.arange(T, dtype=x.dtype)[:, None]
    k_rope = torch.cat([k_rope[:, SQ:], x[..., :R]], 1)
    k_rope = k_rope * angle.cos() + k_rope.roll(1, -1) * angle.sin()
    return mla.combined(x, F.rms_norm(latent, (L,)), k_rope, w_q, w_kv)


def swapped_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One tensor that grows, with the rope key before the latent."""
    cache = torch.cat([torch.cat([k_rope, latent], -1)[:, SQ:], x[..., : R + L]], 1)
    return mla.combined(x, cache[..., R:], cache[..., :R], w_q, w_kv)


def heads_apart(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys and values are stacked from one matrix product per head."""
    kv = torch.stack([latent @ w for w in w_kv.split(P + V, -1)], 1)
    k_nope, v = kv.split([P, V], -1)
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


def weights_apart(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One linear layer per head for the keys, another for the values."""
    w_uk, w_uv = (w.clone() for w in mla.weights(w_kv))
    k = torch.stack([F.linear(latent, w_uk[n]) for n in range(N)], 1)
    v = torch.stack([F.linear(latent, w_uv[n]) for n in range(N)], 2).transpose(1, 2)
    return mla.softmax(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)


def scores_by_baddbmm(addend: Callable[[Tensor, Tensor], tuple[Tensor, float]]) -> Function:
    """Batch and heads in one dimension; `baddbmm` applies the scale and the addend of the scores."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = (t.reshape(-1, t.shape[2], t.shape[3]) for t in mla.naive(*args))
        added, beta = addend(q, k)
        p = torch.baddbmm(added, q, k.transpose(1, 2), beta=beta, alpha=SCALE).softmax(-1)
        return (p @ v).view(-1, N, q.shape[1], V)

    return attention


def scores_in_two_steps(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q_nope, q_rope = (t.reshape(B * N, SQ, -1) for t in mla.queries(x, w_q).split([P, R], -1))
    k_nope, v = (t.reshape(B * N, T, -1) for t in mla.up_projected(latent, w_kv))
    scores = q_rope @ mla.to_heads(k_rope).reshape(B * N, T, R).mT
    scores = torch.baddbmm(scores, q_nope, k_nope.mT, beta=0.5, alpha=2).view(B, N, SQ, T)
    return scores.softmax(-1) @ v.view(B, N, T, V)


def filled(make: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """A buffer all of which is written."""
    return make(v).index_copy(2, torch.arange(T), v)


def token_by_token(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Latents and rope keys of new tokens are written one token at a time."""
    for i in range(SQ):
        latent = torch.select_scatter(latent, x[:, i, :L], 1, T - SQ + i)
        k_rope = torch.select_scatter(k_rope, x[:, i, :R], 1, T - SQ + i)
    return mla.combined(x, latent, k_rope, w_q, w_kv)


def complex_rope(k_rope: Tensor) -> Tensor:
    """The rope key, expanded to all heads and rotated as complex numbers."""
    pairs = torch.view_as_complex(mla.to_heads(k_rope).reshape(B, N, T, R // 2, 2))
    turn = torch.polar(torch.ones(T, R // 2).double(), torch.arange(T).double()[:, None].expand(-1, R // 2))
    return torch.view_as_real(pairs * turn).flatten(3)


def time_first(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Tokens before the batch, `[s, b, h]`, in all tensors."""
    x, latent, k_rope = (t.transpose(0, 1).contiguous() for t in (x, latent, k_rope))
    q = (x @ w_q).view(SQ, B, N, P + R)
    k_nope, v = (latent @ w_kv).view(T, B, N, P + V).split([P, V], -1)
    k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, N, -1)], -1)
    p = (torch.einsum("sbnd,tbnd->bnst", q, k) * SCALE).softmax(-1)
    return torch.einsum("bnst,tbnv->sbnv", p, v)


def rearranged(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """All changes of layout are written with einops."""
    q = einops.rearrange(x @ w_q, "b s (n d) -> b n s d", n=N)
    kv = einops.rearrange(latent @ w_kv, "b t (n d) -> b n t d", n=N)
    k = torch.cat([kv[..., :P], einops.repeat(k_rope, "b t r -> b n t r", n=N)], -1)
    p = (einops.einsum(q, k, "b n s d, b n t d -> b n s t") * SCALE).softmax(-1)
    return einops.einsum(p, kv[..., P:], "b n s t, b n t v -> b s n v")


def rows_of_keys_first(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One weight has all rows of the keys before all rows of the values; their widths do not divide one another."""
    kv = latent @ w_kv
    k_nope, v = (p.view(*latent.shape[:2], N, -1).transpose(1, 2) for p in kv.split([N * P, N * V], -1))
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


def two_scales(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    k_nope, v = mla.up_projected(latent, w_kv)
    return (q_nope @ k_nope.mT / 2 + torch.sub(q_rope @ k_rope[:, None].mT * 3, 1.0)).softmax(-1) @ v


def normed_after_heads(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys are the latents with a norm, which is computed after the latents were expanded to all heads."""
    _, v = mla.up_projected(latent, w_kv)
    w_uk, _ = mla.weights(w_kv)
    k = mla.to_heads(latent)
    k = k * k.pow(2).mean(-1, keepdim=True).rsqrt()
    return mla.softmax(mla.queries(x, w_q)[..., :P] @ w_uk, k, v)


def deepseek_absorb(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The absorbed branch of DeepSeek's own inference code: two score products against the caches."""
    w = w_kv.t().reshape(N, P + V, L)
    q_nope, q_pe = (x @ w_q).view(B, SQ, N, P + R).split([P, R], -1)
    q_nope = torch.einsum("bshd,hdc->bshc", q_nope, w[:, :P])
    scores = torch.einsum("bshc,btc->bsht", q_nope, latent) + torch.einsum("bshr,btr->bsht", q_pe, k_rope)
    o = torch.einsum("bsht,btc->bshc", (scores * SCALE).softmax(-1), latent)
    return torch.einsum("bshc,hdc->bshd", o, w[:, -V:])


ODD: dict[str, Function] = {
    "causal with one query and many keys": lambda x, *rest: mla.sealed(*mla.naive(x[:, :1], *rest), causal=True),
    "another scale for one query": prefill_and_decode,
    "a rope key divided by the number of heads": lambda *a: joined(*a, lambda k: k / N),
    "two scales and a constant": two_scales,
    "a cache that is normed and turned at every step": unnormed_cache,
    "rope key before latent in the cache": swapped_cache,
    "keys and values stacked from heads": heads_apart,
    "a weight a head in a list": weights_apart,
    "scores by baddbmm": scores_by_baddbmm(lambda q, k: (q.new_empty(1, 1, 1), 0)),
    "scores by baddbmm with a bias": scores_by_baddbmm(
        lambda q, k: (torch.zeros(SQ, T).double().masked_fill(torch.ones(SQ, T).tril(3) == 0, -1e9), 1)
    ),
    "scores by baddbmm on those of the rope keys": scores_in_two_steps,
    "a buffer of zeros by index_copy": (
        lambda *a: mla.softmax(*mla.naive(*a)[:2], filled(torch.zeros_like, mla.naive(*a)[2]))
    ),
    "a cache that is written token by token": token_by_token,
    "rope as complex numbers after the heads": lambda *a: joined(*a, complex_rope),
    "rope by roll after the heads": (
        lambda *a: joined(*a, lambda k: mla.to_heads(k) * 0.5 + mla.to_heads(k).roll(1, -1))
    ),
    "all keys before all values": rows_of_keys_first,
    "time first": time_first,
    "einops": rearranged,
    "a constant added to the scores": lambda *a: mla.softmax(*mla.naive(*a), lambda s: s + 2.5),
    "scores taken from a number": lambda *a: mla.softmax(*mla.naive(*a), lambda s: torch.rsub(s, 1.0)),
    "a multiple of a bias": (
        lambda *a: mla.softmax(*mla.naive(*a), lambda s: torch.add(s, torch.arange(T).double(), alpha=-0.5))
    ),
    "a norm of keys after the heads": normed_after_heads,
    "absorbed as DeepSeek does": deepseek_absorb,
}


@pytest.mark.parametrize("function", ODD.values(), ids=ODD)
def test_odd_code_is_rewritten(function: Function) -> None:
    module = capture(function, *mla.tensors())
    before = run(module, *mla.tensors())
    outcomes = rewrite(module, "absorbed")
    assert {outcome.path for outcome in outcomes} == {"absorbed"}
    check_right(before, run(module, *mla.tensors()))
    assert math.isfinite(before.sum())


def turned_in_turn(k_rope: Tensor) -> Tensor:
    """A rope that writes even and odd columns into an empty tensor, after its keys were expanded to all heads."""
    before, angle = mla.to_heads(k_rope), torch.arange(T).double()[:, None]
    turned = torch.empty_like(before)
    turned[..., 0::2] = before[..., 0::2] * angle.cos() - before[..., 1::2] * angle.sin()
    turned[..., 1::2] = before[..., 0::2] * angle.sin() + before[..., 1::2] * angle.cos()
    return turned


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_all_heads_share_rope_keys_that_are_written_in_turn(path: str) -> None:
    module = capture(lambda *args: joined(*args, turned_in_turn), *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, path)
    assert (outcome.path, outcome.mask, outcome.shapes["R"]) == (path, "none", str(R)), outcome.reason
    check_right(before, run(module, *mla.tensors()))


def down_projected(way: str, normed: bool) -> Function:
    """Latents and rope keys are columns of one product with a bias; no rope is applied."""

    def attention(x: Tensor, hidden: Tensor, w_down: Tensor, b_down: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        down = torch.addmm(b_down, hidden.flatten(0, 1), w_down).view(B, T, L + R)
        latent, k_rope = down.split([L, R], dim=-1)
        latent = F.rms_norm(latent, (L,)) if normed else latent
        q = mla.queries(x, w_q)
        if way == "expanded":
            k_nope, v = mla.up_projected(latent, w_kv)
            return mla.softmax(q, torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)
        w_uk, w_uv = mla.weights(w_kv)
        q_latent, latent, k_rope = q[..., :P] @ w_uk, latent[:, None], k_rope[:, None]
        if way == "joined":
            o = mla.softmax(torch.cat([q_latent, q[..., P:]], -1), torch.cat([latent, k_rope], -1), latent)
        else:
            o = ((q_latent @ latent.mT + q[..., P:] @ k_rope.mT) * SCALE).softmax(-1) @ latent
        return o @ w_uv.mT

    return attention


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("way", ["expanded", "joined", "two products"])
def test_a_bias_of_the_down_projection_belongs_to_its_columns(way: str, normed: bool) -> None:
    x, _, _, w_q, w_kv = mla.tensors()
    numbers = torch.randn(L + R, mla.HIDDEN + 1, generator=torch.Generator().manual_seed(0)).double()
    hidden = torch.linspace(-1, 1, B * T * mla.HIDDEN).view(B, T, mla.HIDDEN).double()
    tensors = x, hidden, numbers[:, 1:].t(), numbers[:, 0], w_q, w_kv
    module = capture(down_projected(way, normed), *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed", outcome.reason
    check_right(before, run(module, *tensors))
