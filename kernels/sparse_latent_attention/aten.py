"""Absorbed MLA over named keys out of ATen operations: the CPU implementation, and any device's without a kernel.

A block of queries of one sequence at a time, each of them a sequence of its own with the `topk` keys that it names:

    keys    [s, topk, L], [s, topk, R]   gathered, in float32 for half precision; 0 where nothing attends to one
    q       [s, N, L], [s, N, R]         scaled once
    scores  [s, N, topk]

The blocks bound what exists at a time, and neither work nor memory knows how long the cache is.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ...errors import KernelError
from ..checks import check_alike, check_mask, check_rank, check_shapes
from ..fp8 import bytes_of, check_fp8, dequantised
from ..visibility import reads_values

_BLOCK_ELEMENTS = 1 << 20
"""Most elements of gathered keys, and of scores, at a time: 4 MiB in float32; one query's if that is more."""


def sparse_latent_attention_aten(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    uniform_when_empty: bool,
    latent_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::sparse_latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    check_arguments(q_latent, q_rope, latent, k_rope, indices, mask, latent_scales)
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
                    None if latent_scales is None else latent_scales.expand(batch, tokens, -1)[b],
                    indices[b, block],
                    rows if rows is None or rows.shape[1] == 1 else rows[:, block],
                    None if causal_offset is None else start + causal_offset,
                    scale,
                    out=(o[b, block], lse[b, block]),
                )
    return (uniform_where_empty(o, lse, latent, latent_scales) if uniform_when_empty else o), lse


def uniform_where_empty(o: Tensor, lse: Tensor, latent: Tensor, latent_scales: Tensor | None) -> Tensor:
    """o `[B, Sq, N, L]` with the mean of all latents `[B, T, L]` where lse `[B, Sq, N]` says that no key was seen."""
    empty = lse == -torch.inf
    if not latent.shape[1] or (reads_values(empty) and not bool(empty.any())):
        return o
    if latent_scales is not None:
        latent, _ = dequantised(latent, latent_scales[..., :0], latent_scales, torch.float32)
    mean = latent.mean(1, dtype=torch.promote_types(o.dtype, torch.float32)).to(o.dtype)
    return torch.where(empty[..., None], mean[:, None, None], o)


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
    """One block: q `[s, N, L]`, `[s, N, R]`; cache `[T, L]`, `[T, R]`, scales `[T, G]`; indices `[s, topk]`;
    mask `[N or 1, s or 1, T]`; `first_limit` is the last key that the first query may see; out `[s, N, L]`, `[s, N]`.
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
    latent, k_rope = (bytes_of(part).index_select(0, keys.flatten()).unflatten(0, (s, named)) for part in cache)
    if scales is None:
        latent, k_rope = latent.to(dtype), k_rope.to(dtype)
    else:
        own = scales.index_select(0, keys.flatten()).unflatten(0, (s, named))
        latent, k_rope = dequantised(latent, k_rope, own, dtype)
    if not everything:  # what nothing attends to may be anything, and 0 times NaN is NaN
        latent, k_rope = (part.masked_fill_(~seen[..., None], 0.0) for part in (latent, k_rope))
    q_latent, q_rope = (part.to(dtype).mul(scale) for part in q)
    scores = torch.bmm(latent, q_latent.mT).baddbmm_(k_rope, q_rope.mT).mT  # thin products want the keys as rows
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    if not everything:
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill_((lse == -torch.inf)[..., None], 0.0)
    out[0].copy_(torch.bmm(weights, latent))
    out[1].copy_(lse)


def check_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    latent_scales: Tensor | None = None,
) -> None:
    op = "sparse_latent_attention"
    check_rank(op, "q_latent", q_latent, "B Sq N L")
    check_rank(op, "q_rope", q_rope, "B Sq N R")
    check_rank(op, "latent", latent, "B T L")
    check_rank(op, "indices", indices, "B Sq topk")
    dims = dict(zip(("B", "Sq", "N", "L"), q_latent.shape, strict=True))
    dims |= {"T": latent.shape[1], "R": q_rope.shape[3], "topk": indices.shape[2]}
    check_shapes(
        op,
        dims,
        q_rope=(q_rope, "B Sq N R"),
        latent=(latent, "B T L"),
        k_rope=(k_rope, "B T R"),
        indices=(indices, "B Sq topk"),
    )
    check_alike(op, q_latent=q_latent, q_rope=q_rope)
    if latent_scales is None:
        check_alike(op, q_latent=q_latent, latent=latent, k_rope=k_rope)
    else:
        check_fp8(op, q_latent, ("latent", "k_rope"), (latent, k_rope), "B T", latent_scales)
    check_mask(op, mask, (dims["B"], dims["N"], dims["Sq"], dims["T"]), q_latent.device)
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q_latent.device:
        raise KernelError(
            f"mla::{op}: expected indices of torch.int32 or torch.int64 on {q_latent.device}, "
            f"found {indices.dtype} on {indices.device}"
        )


torch.library.impl("mla::sparse_latent_attention", "CompositeExplicitAutograd")(sparse_latent_attention_aten)
