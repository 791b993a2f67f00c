"""One MLA attention, written in many ways.

Of the sizes, only N is divisible by 5 and only T by 11, so that tensors with heads and keys can be told from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, SQ, T, N, L, P, R, V, HIDDEN = 2, 3, 11, 5, 7, 4, 2, 6, 13
SCALE = 1 / math.sqrt(P + R)

Function = Callable[..., Tensor]


def tensors(batch: int = B, queries: int = SQ) -> tuple[Tensor, ...]:
    """`x` [B, Sq, HIDDEN], `latent` [B, T, L], `k_rope` [B, T, R], `w_q` [HIDDEN, N (P + R)], `w_kv` [L, N (P + V)]."""
    shapes = (batch, queries, HIDDEN), (batch, T, L), (batch, T, R), (HIDDEN, N * (P + R)), (L, N * (P + V))
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return made[0], made[1], made[2], made[3] / math.sqrt(HIDDEN), made[4] / math.sqrt(L)


UNKNOWN = [(0, 1), (0, 1), (0, 1)]
"""Dimensions of `tensors()` to make symbolic: batch, queries and keys."""


def sealed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    **kw: object,
) -> Tensor:
    """SDPA as `mla_compile.dynamo.seal` writes it."""
    return torch.ops.mla.sealed_attention(q, k, v, mask, dropout, causal, kw.get("scale"), kw.get("enable_gqa", False))


def softmax(q: Tensor, k: Tensor, v: Tensor, change: Function = lambda s: s) -> Tensor:
    """Attention by hand, `change` applied to its scaled scores."""
    return change((q @ k.transpose(-1, -2)) * SCALE).softmax(-1) @ v


def queries(x: Tensor, w_q: Tensor) -> Tensor:
    """[B, N, Sq, P + R]"""
    return (x @ w_q).view(x.shape[0], x.shape[1], N, P + R).transpose(1, 2)


def up_projected(latent: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N, T, P] and [B, N, T, V]"""
    kv = (latent @ w_kv).view(latent.shape[0], latent.shape[1], N, P + V).transpose(1, 2)
    return kv.split([P, V], dim=-1)


def to_heads(k_rope: Tensor) -> Tensor:
    """[B, N, T, R]"""
    return k_rope[:, None].expand(-1, N, -1, -1)


def naive(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`q` [B, N, Sq, P + R], `k` [B, N, T, P + R], `v` [B, N, T, V]."""
    k_nope, v = up_projected(latent, w_kv)
    return queries(x, w_q), torch.cat([k_nope, to_heads(k_rope)], -1), v


def weights(w_kv: Tensor) -> tuple[Tensor, Tensor]:
    """`w_uk` [N, P, L], `w_uv` [N, V, L]"""
    return w_kv.t().view(N, P + V, L).split([P, V], dim=1)


def combined(*args: Tensor) -> Tensor:
    return softmax(*naive(*args))


def combined_sdpa(*args: Tensor) -> Tensor:
    return sealed(*naive(*args))


def transposed_output(*args: Tensor) -> Tensor:
    o = sealed(*naive(*args)).transpose(1, 2)
    return o.reshape(o.shape[0], o.shape[1], N * V)


def with_buffers(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """As in transformers: `new_empty`, then two slices written."""
    k_nope, v = up_projected(latent, w_kv)
    k = k_nope.new_empty(*k_nope.shape[:3], P + R)
    k[..., :P] = k_nope
    k[..., P:] = k_rope[:, None]
    q_nope, q_rope = queries(x, w_q).split([P, R], -1)
    q = q_nope.new_empty(*q_nope.shape[:3], P + R)
    q[..., :P].copy_(q_nope)
    q[..., P:].copy_(q_rope)
    return sealed(q, k, v)


def separate_einsum(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Heads after tokens, one weight for keys and one for values, `einsum`."""
    w_uk, w_uv = weights(w_kv)
    q = (x @ w_q).view(x.shape[0], x.shape[1], N, P + R)
    k = torch.cat([torch.einsum("btl,npl->btnp", latent, w_uk), k_rope[:, :, None].expand(-1, -1, N, -1)], -1)
    v = torch.einsum("btl,nvl->btnv", latent, w_uv)
    p = (torch.einsum("bsnd,btnd->bnst", q, k) * SCALE).softmax(-1)
    return torch.einsum("bnst,btnv->bsnv", p, v)


def two_scores(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q_nope, q_rope = queries(x, w_q).split([P, R], -1)
    k_nope, v = up_projected(latent, w_kv)
    scores = q_nope @ k_nope.transpose(-1, -2) + q_rope @ to_heads(k_rope).transpose(-1, -2)
    return (scores * SCALE).softmax(-1) @ v


def two_scores_einsum(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q_nope, q_rope = queries(x, w_q).split([P, R], -1)
    k_nope, v = up_projected(latent, w_kv)
    scores = torch.einsum("bnsp,bntp->bnst", q_nope, k_nope) / 2 + torch.einsum("bnsr,btr->bnst", q_rope, k_rope) * 0.3
    return torch.einsum("bnst,bntv->bsnv", scores.softmax(-1), v)


def scores_by_sums(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Each product of two vectors is the sum of an elementwise product."""
    q_nope, q_rope = queries(x, w_q)[:, :, :, None].split([P, R], -1)
    k_nope, v = up_projected(latent, w_kv)
    scores = (q_nope * k_nope[:, :, None]).sum(-1) + (q_rope * k_rope[:, None, None]).sum(-1)
    return (scores * SCALE).softmax(-1) @ v


def up_projections_by_sums(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    w_uk, w_uv = weights(w_kv)
    k, v = ((latent[:, None, :, None] * w[:, None]).sum(-1) for w in (w_uk, w_uv))
    return softmax(queries(x, w_q), torch.cat([k, to_heads(k_rope)], -1), v)


def rope_first(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    k_nope, v = up_projected(latent, w_kv)
    return softmax(queries(x, w_q), torch.cat([to_heads(k_rope), k_nope], -1), v)


def rope_on_both_sides(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    k_nope, v = up_projected(latent, w_kv)
    first, second = to_heads(k_rope).split(R // 2, -1)
    return softmax(queries(x, w_q), torch.cat([first, k_nope, second], -1), v)


def rope_in_half_rotations(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The rope parts are rotated, in halves."""
    angle = torch.arange(latent.shape[1], dtype=latent.dtype)[:, None]
    k_rope = k_rope * angle.cos() + torch.cat([-k_rope[..., R // 2 :], k_rope[..., : R // 2]], -1) * angle.sin()
    q_nope, q_rope = queries(x, w_q).split([P, R], -1)
    turned = torch.cat([-q_rope[..., R // 2 :], q_rope[..., : R // 2]], -1)
    q = torch.cat([q_nope, q_rope * 0.5 + turned * 0.8], -1)
    k_nope, v = up_projected(latent, w_kv)
    return softmax(q, torch.cat([k_nope, to_heads(k_rope)], -1), v)


def without_rope(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    return softmax(queries(x, w_q)[..., :P], *up_projected(latent, w_kv))


def normed_latent(x: Tensor, latent: Tensor, *rest: Tensor) -> Tensor:
    return combined(x, F.rms_norm(latent, (L,)), *rest)


def latent_from_one_projection(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The latent and rope key of this step alone, from one tensor; the latent is not normed."""
    both = torch.cat([latent, k_rope], -1)
    return combined(x, both[..., :L], both[..., L:], w_q, w_kv)


def grown_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    new = x[..., :L] * 2
    latent = torch.cat([latent[:, : T - SQ], new], 1)
    k_rope = torch.cat([k_rope[:, : T - SQ], x[..., :R]], 1)
    return combined_sdpa(x, latent, k_rope, w_q, w_kv)


def buffer_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    latent, positions = latent.clone(), torch.arange(SQ) + 4
    latent.index_copy_(1, positions, x[..., :L])
    return combined_sdpa(x, latent, k_rope, w_q, w_kv)


def values_first(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The combined weight has the values' rows before the keys'."""
    kv = (latent @ w_kv).view(latent.shape[0], -1, N, V + P).transpose(1, 2)
    v, k_nope = kv.split([V, P], -1)
    return softmax(queries(x, w_q), torch.cat([k_nope, to_heads(k_rope)], -1), v)


def keys_of_all_heads_first(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The combined weight has the keys' rows of all heads, then the values', both of one width as in DeepSeek-V3."""
    kv = latent @ torch.cat([w_kv, w_kv[:, : N * 2].tanh()], -1)
    k, v = (part.view(*latent.shape[:2], N, V).transpose(1, 2) for part in kv.split([N * V, N * V], -1))
    return softmax(queries(x, w_q), k, v)


def merged_batch(*args: Tensor) -> Tensor:
    """Batch and heads in one dimension, as in code that uses `baddbmm`."""
    q, k, v = (t.reshape(-1, t.shape[2], t.shape[3]) for t in naive(*args))
    o = torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(SCALE).softmax(-1), v)
    return o.view(-1, N, o.shape[1], V)


def transposed_scores(*args: Tensor) -> Tensor:
    """Scores are keys times queries, [B, N, T, Sq]; the softmax is over T."""
    q, k, v = naive(*args)
    return ((k @ q.transpose(-1, -2)) * SCALE).softmax(-2).transpose(-1, -2) @ v


def transposed_result(*args: Tensor) -> Tensor:
    """Transposed values times transposed attention weights."""
    q, k, v = naive(*args)
    p = ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1)
    return v.transpose(-1, -2) @ p.transpose(-1, -2)


def scale_on_q(*args: Tensor) -> Tensor:
    q, k, v = naive(*args)
    return ((q * SCALE) @ k.transpose(-1, -2)).softmax(-1) @ v


def scale_on_k(*args: Tensor) -> Tensor:
    q, k, v = naive(*args)
    return (q @ (k * SCALE).transpose(-1, -2)).softmax(-1) @ v


def scale_on_nope_only(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    k_nope, v = up_projected(latent, w_kv)
    return softmax(queries(x, w_q), torch.cat([k_nope * 0.7, to_heads(k_rope)], -1), v)


def scale_everywhere(*args: Tensor) -> Tensor:
    q, k, v = naive(*args)
    return sealed(q * 0.9, k / 2, v, scale=0.8)


def expanded_groups(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Two query heads share one key head, which is repeated by `expand` and `reshape`."""
    q, k, v = naive(x, latent, k_rope, w_q, w_kv)
    q = torch.stack([q, q.flip(-1)], 2).reshape(-1, 2 * N, q.shape[2], P + R)
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, 2 * N, t.shape[2], t.shape[3]) for t in (k, v))
    return softmax(q, k, v)


def groups_with_rope_queries_behind(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One product has first the queries of all heads, then their rope queries; two heads share one key head."""
    both = (x @ torch.cat([w_q, w_q.flip(1)], 1)).split([2 * N * P, 2 * N * R], -1)
    q, q_rope = (part.unflatten(-1, (2 * N, -1)).transpose(1, 2) for part in both)
    k, v = (heads.repeat_interleave(2, 1) for heads in up_projected(latent, w_kv))
    scores = q @ k.mT + q_rope @ k_rope[:, None].expand(-1, 2 * N, -1, -1).mT
    return (scores * SCALE).softmax(-1) @ v


def grouped_sdpa(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    q, k, v = naive(x, latent, k_rope, w_q, w_kv)
    q = torch.stack([q, q.flip(-1)], 2).reshape(-1, 2 * N, q.shape[2], P + R)
    return sealed(q, k, v, enable_gqa=True)


def cast_softmax(*args: Tensor) -> Tensor:
    """A softmax with a dtype, and a cast back. All is float64 here, so that the graph has no cast."""
    q, k, v = naive(*args)
    return ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1, dtype=torch.float64).to(q.dtype) @ v


def absorbed_by_hand(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    w_uk, w_uv = weights(w_kv)
    q_nope, q_rope = queries(x, w_q).split([P, R], -1)
    q_latent = torch.einsum("bnsp,npl->bnsl", q_nope, w_uk)
    scores = torch.einsum("bnsl,btl->bnst", q_latent, latent) + torch.einsum("bnsr,btr->bnst", q_rope, k_rope)
    o = torch.einsum("bnst,btl->bnsl", (scores * SCALE).softmax(-1), latent)
    return torch.einsum("bnsl,nvl->bnsv", o, w_uv)


def scale_on_v(*args: Tensor) -> Tensor:
    """Values, and then what all have in common, are multiplied by a number; one row sees nothing."""
    q, k, v = naive(*args)
    mask = torch.ones(SQ, T, dtype=torch.bool).tril(-1)
    return sealed(q, k, (v * 0.5 + torch.arange(V).to(v.dtype)) * 3, mask[-q.shape[2] :])


def keys_added_to_themselves(*args: Tensor) -> Tensor:
    """Joined keys, so that each head's copy of a rope key is one of a sum."""
    q, k, v = naive(*args)
    return sealed(q, k + 0.5 * k, v)


SPELLINGS: dict[str, Function] = {
    f.__name__.replace("_", " "): f
    for f in (
        combined,
        combined_sdpa,
        transposed_output,
        with_buffers,
        separate_einsum,
        two_scores,
        two_scores_einsum,
        scores_by_sums,
        up_projections_by_sums,
        rope_first,
        rope_on_both_sides,
        rope_in_half_rotations,
        without_rope,
        normed_latent,
        latent_from_one_projection,
        values_first,
        keys_of_all_heads_first,
        merged_batch,
        transposed_scores,
        transposed_result,
        scale_on_q,
        scale_on_k,
        scale_on_nope_only,
        scale_everywhere,
        scale_on_v,
        keys_added_to_themselves,
        expanded_groups,
        groups_with_rope_queries_behind,
        grouped_sdpa,
        cast_softmax,
    )
}
"""Attentions that expand keys and values for every head: these the passes rewrite on both paths."""
