"""Absorbed MLA from ATen matrix products, for everything without a kernel of its own.

An online softmax (Milakov and Gimelshein, arXiv 1805.02867) over chunks of keys, with heads and query tokens together
as the rows of one product:

    q     [b, Sq * N, L], [b, Sq * N, R]
    keys  [b, C, L], [b, C, R]              views of the cache; a float32 copy of the chunk for half precision
    s     [b, Sq * N, C]
    o     [b, Sq * N, L]                    running and unnormalised, beside each row's maximum m and total

Half precision is computed in float32: rounding scores to bfloat16 costs more than casting a chunk, and there are CPUs
where a bfloat16 product is hundreds of times slower than a float32 one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..visibility import KeyPositions, Visibility, split, take
from .arguments import LatentAttention

_CHUNK_ELEMENTS = 1 << 20
"""Elements of latent and rope key in a chunk: 4 MiB in float32, read for the scores and again for the output."""
_ROWS = 2048
"""The most rows (sequences times queries times heads) at a time; at least those of one query token."""
_SLAB_ELEMENTS = 1 << 20
"""The most scores at a time: 4 MiB in float32."""
_FEW_ROWS = 128
"""Up to this many rows, a product with the keys as its rows is faster, even with the scores transposed afterwards
(measured with MKL)."""


def attend(x: LatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    o = x.q_latent.new_empty(x.q_latent.shape)
    lse = x.q_latent.new_empty(x.q_latent.shape[:3], dtype=torch.float32)
    mask, latent, k_rope = x.mask, x.latent, x.k_rope
    per_sequence = mask is not None and mask.shape[0] != 1
    for sequences, queries, chunk in _blocks(x.q_latent, x.q_rope, latent, one_by_one=per_sequence):
        block = slice(sequences.start, sequences.stop), slice(queries.start, queries.stop)
        seen = mask[block[0]] if mask is not None and per_sequence else mask
        visibility = Visibility(seen, x.causal_offset, latent.shape[1], latent.device)
        _attend(
            (x.q_latent[block], x.q_rope[block]),
            (latent[block[0]], k_rope[block[0]]),
            visibility,
            queries,
            chunk,
            x.scale,
            out=(o[block], lse[block]),
        )
    return o, lse


def _blocks(q_latent: Tensor, q_rope: Tensor, latent: Tensor, one_by_one: bool) -> Iterator[tuple[range, range, int]]:
    """Yield sequences, queries and the size of a chunk of keys, so that keys and scores stay within their bounds.

    Sequences are taken together only as far as their keys fit one chunk, and alone where the mask differs between them,
    because then each has keys of its own to skip.
    """
    batch, query_count, heads, rank = q_latent.shape
    keys = max(_CHUNK_ELEMENTS // (rank + q_rope.shape[3]), 1)
    query_step = max(_ROWS // max(heads, 1), 1)
    rows = min(query_step, query_count) * heads
    together = 1 if one_by_one else max(min(keys // max(latent.shape[1], 1), _ROWS // max(rows, 1)), 1)
    chunk = max(min(keys, _SLAB_ELEMENTS // max(rows, 1)) // together, 1)
    for sequence in range(0, batch, together):
        for query in range(0, query_count, query_step):
            sequences = range(sequence, min(sequence + together, batch))
            yield sequences, range(query, min(query + query_step, query_count)), chunk


def _attend(
    q: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    visibility: Visibility,
    queries: range,
    chunk: int,
    scale: float,
    out: tuple[Tensor, Tensor],
) -> None:
    """One block: q `[b, s, N, L]`, `[b, s, N, R]`; cache `[b, T, L]`, `[b, T, R]`; out `[b, s, N, L]`, `[b, s, N]`."""
    dtype = torch.promote_types(q[0].dtype, torch.float32)
    b, s, n, rank = q[0].shape
    q_latent, q_rope = (part.to(dtype).reshape(b, s * n, part.shape[3]) for part in q)
    # The lowest finite number, not -inf: a row whose scores are all -inf then gets exp(-inf), not NaN.
    m = q_latent.new_full((b, s * n, 1), torch.finfo(dtype).min)
    total = q_latent.new_zeros((b, s * n, 1))
    result = out[0].view(b, s * n, rank)
    o = result if result.dtype == dtype else torch.empty_like(q_latent)
    chunks = list(split(visibility.keys(queries), chunk))
    if not chunks:
        o.zero_()
    for keys in chunks:
        latent, k_rope = (_load(part, keys, visibility, queries, dtype) for part in cache)
        scores = _scores(q_latent, q_rope, latent, k_rope, scale)
        bias = visibility.bias(queries, keys, dtype)
        if bias is not None:
            scores.view(b, s, n, len(keys)).add_(bias.transpose(1, 2))
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        scores.sub_(m_new).exp_()
        if keys is chunks[0]:
            torch.bmm(scores, latent, out=o)
        else:
            decay = m.sub_(m_new).exp_()
            total.mul_(decay)
            o.mul_(decay).baddbmm_(scores, latent)
        total.add_(scores.sum(-1, keepdim=True))
        m = m_new
    # A row's greatest score adds exp(0) = 1 to its total, so only a row that saw no key is below 1.
    torch.div(o, total.clamp_min(1), out=result)
    out[1].copy_(m.add_(total.log_()).view(b, s, n))


def _load(part: Tensor, keys: KeyPositions, visibility: Visibility, queries: range, dtype: torch.dtype) -> Tensor:
    """Keys `[b, C, width]` in the dtype of the arithmetic: a view of the cache where that is possible."""
    loaded = take(part, keys, 1).to(dtype)
    blanks = visibility.blanks(queries, keys)
    return loaded if blanks is None else loaded.masked_fill(blanks[:, :, None], 0.0)


def _scores(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """Contiguous scores `[b, rows, C]`."""
    few = q_latent.shape[1] <= _FEW_ROWS
    first, second = ((latent, k_rope), (q_latent, q_rope)) if few else ((q_latent, q_rope), (latent, k_rope))
    scores = torch.bmm(first[0], second[0].transpose(1, 2))
    scores.baddbmm_(first[1], second[1].transpose(1, 2), beta=scale, alpha=scale)
    return scores.transpose(1, 2).contiguous() if few else scores


latent_attention_aten = checked(LatentAttention, attend)
implement("latent_attention", "CompositeExplicitAutograd", latent_attention_aten)
