"""Absorbed MLA over named keys with ATen operations, for everything without a kernel of its own.

Takes a block of queries of one sequence at a time; each query attends alone to the `topk` keys that it names:

    keys    [s, topk, L], [s, topk, R]   gathered, in float32 for half precision; 0 where nothing attends to one
    q       [s, N, L], [s, N, R]         scaled once
    scores  [s, N, topk]

Blocks bound the memory in use, and neither work nor memory depends on the length of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..coded import dequantised, taken
from ..visibility import reads_values
from .arguments import SparseLatentAttention

_BLOCK_ELEMENTS = 1 << 20
"""The most elements of gathered keys, and of scores, at a time: 4 MiB in float32; at least those of one query."""


def attend(x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    q_latent, q_rope, latent, k_rope, indices, mask = x.q_latent, x.q_rope, x.latent, x.k_rope, x.indices, x.mask
    batch, query_count, heads, rank = q_latent.shape
    tokens, named = latent.shape[1], indices.shape[2]
    o = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full((batch, query_count, heads), -torch.inf, dtype=torch.float32)
    if tokens and named and heads:
        step = max(_BLOCK_ELEMENTS // (named * max(rank + k_rope.shape[2], heads)), 1)
        for b in range(batch):
            rows = None if mask is None else mask[min(b, mask.shape[0] - 1)].expand(-1, -1, tokens)
            for start in range(0, query_count, step):
                block = slice(start, min(start + step, query_count))
                _attend(
                    (q_latent[b, block], q_rope[b, block]),
                    (latent[b], k_rope[b]),
                    None if x.latent_scales is None else x.latent_scales.expand(batch, tokens, -1)[b],
                    indices[b, block],
                    rows if rows is None or rows.shape[1] == 1 else rows[:, block],
                    None if x.causal_offset is None else start + x.causal_offset,
                    x.scale,
                    out=(o[b, block], lse[b, block]),
                )
    return finished(x, o, lse)


def finished(x: SparseLatentAttention, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """o `[B, Sq, N, L]` and lse `[B, Sq, N]`; with `uniform_when_empty`, rows of o whose lse says that they saw no key
    are replaced by the mean of all latents."""
    empty, latent = lse == -torch.inf, x.latent
    if not x.uniform_when_empty or not latent.shape[1] or (reads_values(empty) and not bool(empty.any())):
        return o, lse
    if x.latent_scales is not None:
        latent, _ = dequantised(latent, x.latent_scales[..., :0], x.latent_scales, torch.float32)
    mean = latent.mean(1, dtype=torch.promote_types(o.dtype, torch.float32)).to(o.dtype)
    return torch.where(empty[..., None], mean[:, None, None], o), lse


def _attend(
    q: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    scales: Tensor | None,
    indices: Tensor,
    mask: Tensor | None,
    first_limit: int | None,
    scale: float,
    out: tuple[Tensor, Tensor],
) -> None:
    """Fill `out`, `[s, N, L]` and `[s, N]`, for one block of queries.

    q `[s, N, L]`, `[s, N, R]`; cache `[T, L]`, `[T, R]`, scales `[T, G]`; indices `[s, topk]`; mask
    `[N or 1, s or 1, T]`; `first_limit` is the last key that the first query may see.
    """
    dtype = torch.promote_types(q[0].dtype, torch.float32)
    s, named = indices.shape
    seen = (indices >= 0) & (indices < cache[0].shape[0])
    if first_limit is not None:
        seen = seen & (indices <= torch.arange(first_limit, first_limit + s, device=indices.device)[:, None])
    keys = indices.where(seen, 0).long()
    bias = None
    if mask is not None:
        bias = mask.expand(-1, s, -1).gather(2, keys.expand(mask.shape[0], -1, -1)).transpose(0, 1)  # [s, N or 1, topk]
        if bias.dtype == torch.bool:
            bias = bias & seen[:, None]
            seen, bias = (bias[:, 0], None) if bias.shape[1] == 1 else (bias.any(1), bias)
    everything = reads_values(seen) and bool(seen.all())
    rows = keys.flatten()
    latent, k_rope = (taken(part, lambda all: all.index_select(0, rows).unflatten(0, (s, named))) for part in cache)
    own = None if scales is None else scales.index_select(0, keys.flatten()).unflatten(0, (s, named))
    latent, k_rope = dequantised(latent, k_rope, own, dtype)
    if not everything:  # keys that nothing attends to may hold anything, and 0 times NaN is NaN
        latent, k_rope = (part.masked_fill_(~seen[..., None], 0.0) for part in (latent, k_rope))
    q_latent, q_rope = (part.to(dtype).mul(scale) for part in q)
    # Thin products are faster with the keys as rows.
    scores = torch.bmm(latent, q_latent.mT).baddbmm_(k_rope, q_rope.mT).mT
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(dtype)
    if not everything:
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill_((lse == -torch.inf)[..., None], 0.0)
    out[0].copy_(torch.bmm(weights, latent))
    out[1].copy_(lse)


sparse_latent_attention_aten = checked(SparseLatentAttention, attend)
implement("sparse_latent_attention", "CompositeExplicitAutograd", sparse_latent_attention_aten)
