"""Small graphs, one for each combination of a path with a way to cache, mask or scale the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

B, SQ, T, N, L, P, R, V = 2, 3, 12, 4, 16, 12, 8, 10
PAGE_SIZE, PAGES, GROUPS, TOPK = 4, 9, 2, 5


@dataclass(frozen=True)
class Case:
    """A function and its inputs, and the path that is asked for; `symbolic[i]` are the symbolic dimensions of input i.

    `exported`: the graph takes no guards. `on_a_gpu`: as on devices whose kernels do not look at masks.
    """

    function: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    path: str
    symbolic: Sequence[Sequence[int]] = field(default=())
    exported: bool = False
    on_a_gpu: bool = False


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def up_projected(latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor]:
    """`k` [B, N, T, P + R] and `v` [B, N, T, V]."""
    k_nope, v = (latent @ w_kv.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    return torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1), v


def attend(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Naive MLA by sealed SDPA."""
    k, v = up_projected(latent, k_rope, w_kv)
    return torch.ops.mla.sealed_attention(q, k, v, mask, 0.0, causal, None, False)


def by_hand(weights: Callable[[Tensor], Tensor], q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    """Naive MLA whose weights are a function of the scaled scores."""
    k, v = up_projected(latent, k_rope, w_kv)
    return weights(q @ k.mT * (P + R) ** -0.5) @ v


def queries(count: int = SQ) -> Tensor:
    return random(B, N, count, P + R)


W_KV = random(N * (P + V), L)
OWN_ROPES = random(B, N, T, R)
LATENT, K_ROPE = random(B, T, L), random(B, T, R)
POOL, TABLE = random(PAGES, PAGE_SIZE, L + R), torch.tensor([[1, 5, 2], [8, 7, 3]])
LENGTHS = torch.tensor([7, 12])
SCORES = random(B, SQ, T)
FP8 = torch.float8_e4m3fn
NUMBERS, SCALES = random(PAGES, PAGE_SIZE, L).to(FP8), random(PAGES, PAGE_SIZE, GROUPS).abs()
SINK = random(N)


def plain(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    return attend(q, latent, k_rope, w_kv)


def causal(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    seen = torch.arange(latent.shape[1]) <= torch.arange(q.shape[2])[:, None] + latent.shape[1] - q.shape[2]
    return attend(q, latent, k_rope, w_kv, seen)


def growing(q: Tensor, past: Tensor, k_rope: Tensor, new: Tensor, w_kv: Tensor) -> Tensor:
    return causal(q, torch.cat([past, new], dim=1), k_rope, w_kv)


def static(q: Tensor, cache: Tensor, new: Tensor, lengths: Tensor, w_kv: Tensor) -> Tensor:
    cache = cache.slice_scatter(new, 1, 0, new.shape[1])
    latent, k_rope = cache.split([L, R], dim=-1)
    seen = torch.arange(T) < lengths[:, None, None, None]
    return attend(q, latent, k_rope, w_kv, seen)


def paged(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, w_kv: Tensor) -> Tensor:
    latent, k_rope = pool[table].flatten(1, 2).split([L, R], dim=-1)
    seen = torch.arange(T) < lengths[:, None, None, None]
    return attend(q, latent, k_rope, w_kv, seen)


def fp8_paged(q: Tensor, numbers: Tensor, scales: Tensor, rope: Tensor, table: Tensor, w_kv: Tensor) -> Tensor:
    latent = numbers[table].flatten(1, 2).float().unflatten(-1, (GROUPS, -1))
    latent = (latent * scales[table].flatten(1, 2)[..., None]).flatten(-2)
    return attend(q, latent, rope[table].flatten(1, 2), w_kv)


def named_keys(scores: Tensor) -> Tensor:
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(TOPK).indices, True)[:, None]


def named(q: Tensor, scores: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    return attend(q, latent, k_rope, w_kv, named_keys(scores))


def named_paged(q: Tensor, scores: Tensor, pool: Tensor, table: Tensor, w_kv: Tensor) -> Tensor:
    latent, k_rope = pool[table].flatten(1, 2).split([L, R], dim=-1)
    return attend(q, latent, k_rope, w_kv, named_keys(scores))


def named_fp8(q: Tensor, scores: Tensor, numbers: Tensor, k_rope: Tensor, by: Tensor, w_kv: Tensor) -> Tensor:
    return attend(q, numbers.float() * by, k_rope, w_kv, named_keys(scores))


def sinks(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor, sink: Tensor) -> Tensor:
    def weights(scores: Tensor) -> Tensor:
        share = sink.view(1, N, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, share], dim=-1).softmax(-1)[..., :-1]

    return by_hand(weights, q, latent, k_rope, w_kv)


def soft_cap(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    return by_hand(lambda scores: (30 * torch.tanh(scores / 30)).softmax(-1), q, latent, k_rope, w_kv)


def own_ropes(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
    """The rope keys `[B, N, T, R]` are those of each head."""
    k_nope, v = (latent @ w_kv.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    return torch.ops.mla.sealed_attention(q, torch.cat([k_nope, k_rope], dim=-1), v, None, 0.0, False, None, False)


def two_latents(
    q: Tensor, past: Tensor, k_rope: Tensor, new: Tensor, w_kv: Tensor, first: Tensor, w_first: Tensor
) -> Tensor:
    """The values of another latent, that of the first layer perhaps, are added to those of this one."""
    k, v = up_projected(torch.cat([past, new], dim=1), k_rope, w_kv)
    v = v + (first @ w_first.T).unflatten(2, (N, V)).transpose(1, 2)
    return torch.ops.mla.sealed_attention(q, k, v, None, 0.0, False, None, False)


def turned_keys(q: Tensor, past: Tensor, new: Tensor, angle: Tensor, w_kv: Tensor) -> Tensor:
    """Keys are rotated after their up-projection."""
    latent = torch.cat([past, new], dim=1)
    k, v = (latent @ w_kv.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = k * angle.cos() + torch.cat([-k[..., P // 2 :], k[..., : P // 2]], dim=-1) * angle.sin()
    return torch.ops.mla.sealed_attention(q[..., :P], k, v, None, 0.0, False, None, False)


def capped_turned_keys(q: Tensor, past: Tensor, new: Tensor, angle: Tensor, w_kv: Tensor) -> Tensor:
    latent = torch.cat([past, new], dim=1)
    k, v = (latent @ w_kv.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    return (30 * torch.tanh(q[..., :P] @ (k * angle.cos()).mT / 30)).softmax(-1) @ v


def absorbed_by_hand(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
    scores = q_latent @ latent[:, None].mT + q_rope @ k_rope[:, None].mT
    return (scores * (P + R) ** -0.5).softmax(-1) @ latent[:, None]


KEYS = LATENT, K_ROPE, W_KV
IN_PAGES = POOL, TABLE, LENGTHS, W_KV
IN_FP8 = NUMBERS, SCALES, random(PAGES, PAGE_SIZE, R), TABLE, W_KV
STATIC = random(B, T, L + R), random(B, SQ, L + R), LENGTHS, W_KV
TURNED = LATENT[:, SQ:], LATENT[:, :SQ], random(T, P), W_KV
GROWN = LATENT[:, SQ:], K_ROPE, LATENT[:, :SQ], W_KV
FIRST = random(B, T, L), random(N * V, L)
ANY = (0, 2), (0, 1), (0, 1), ()
"""Symbolic sizes: sequences, queries and keys."""

CASES = {
    "absorbed, plain": Case(plain, (queries(), *KEYS), "absorbed"),
    "absorbed, causal": Case(causal, (queries(), *KEYS), "absorbed"),
    "absorbed, growing": Case(growing, (queries(), *GROWN), "absorbed"),
    "absorbed, static": Case(static, (queries(), *STATIC), "absorbed"),
    "absorbed, static on a GPU": Case(static, (queries(), *STATIC), "absorbed", on_a_gpu=True),
    "absorbed, paged": Case(paged, (queries(), *IN_PAGES), "absorbed"),
    "absorbed, FP8 pages": Case(fp8_paged, (queries(), *IN_FP8), "absorbed"),
    "absorbed, named keys": Case(named, (queries(), SCORES, *KEYS), "absorbed"),
    "absorbed, sinks": Case(sinks, (queries(), *KEYS, SINK), "absorbed"),
    "absorbed, by hand": Case(absorbed_by_hand, (random(B, N, SQ, L), random(B, N, SQ, R), *KEYS[:2]), "auto"),
    "absorbed, two latents": Case(two_latents, (queries(), *GROWN, *FIRST), "absorbed"),
    "absorbed, symbolic": Case(plain, (queries(), *KEYS), "absorbed", ANY),
    "chunked, plain": Case(plain, (queries(), *KEYS), "chunked"),
    "chunked, causal": Case(causal, (queries(), *KEYS), "chunked"),
    "chunked, growing": Case(growing, (queries(), *GROWN), "chunked"),
    "chunked, static": Case(static, (queries(), *STATIC), "chunked"),
    "chunked, paged": Case(paged, (queries(), *IN_PAGES), "chunked"),
    "chunked, FP8 pages": Case(fp8_paged, (queries(), *IN_FP8), "chunked"),
    "chunked, named keys": Case(named, (queries(), SCORES, *KEYS), "chunked"),
    "chunked, sinks": Case(sinks, (queries(), *KEYS, SINK), "chunked"),
    "chunked, own ropes": Case(own_ropes, (queries(), LATENT, OWN_ROPES, W_KV), "chunked"),
    "chunked, two latents": Case(two_latents, (queries(), *GROWN, *FIRST), "chunked"),
    "chunked, opaque": Case(soft_cap, (queries(), *KEYS), "chunked"),
    "sparse, named keys": Case(named, (queries(), SCORES, *KEYS), "sparse"),
    "sparse, paged": Case(named_paged, (queries(), SCORES, POOL, TABLE, W_KV), "sparse"),
    "sparse, FP8 keys": Case(
        named_fp8, (queries(), SCORES, LATENT.to(FP8), K_ROPE, random(B, T, 1).abs(), W_KV), "sparse"
    ),
    "values, growing": Case(turned_keys, (queries(), *TURNED), "values"),
    "values, opaque": Case(capped_turned_keys, (queries(), *TURNED), "values"),
    "opaque, plain": Case(soft_cap, (queries(), *KEYS), "absorbed"),
    "either, exported": Case(plain, (queries(), *KEYS), "auto", ANY, exported=True),
    "absorbed, exported": Case(causal, (queries(), *KEYS), "absorbed", ANY, exported=True),
    "chunked, exported": Case(causal, (queries(), *KEYS), "chunked", ANY, exported=True),
}
