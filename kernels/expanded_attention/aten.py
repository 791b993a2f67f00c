"""Chunked MLA out of ATen operations: the CPU implementation, and any device's that has no kernel of its own.

A sequence and a group of heads at a time, the keys and values of at most `workspace_tokens` tokens are up-projected into
a workspace, every query that sees some of them attends to them, and the result is merged with what the query has:

    latent  [C, L]            a view of the cache; a float32 copy of the chunk for half precision
    k, v    [H, C, D]         D is the greater of P + R and V, because CPU flash attention wants one width; 0 beyond
    o, lse  [H, Sq, V], [H, Sq]

With a causal offset alone, chunks are cut so that each is either seen whole by all queries, or starts where some query's
view ends: a triangle for flash attention's own causal flag, and a rectangle under it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..checks import check_alike, check_mask, check_rank, check_shapes
from ..merge_states.aten import share_of_second
from ..visibility import Keys, Visibility, split, take

_HEADS = 16
"""Heads at a time. Bounds the workspace of a model of 128 heads; the weights of 16 are a few MB in float32."""
_QUERIES = 1024
"""Queries at a time. CPU flash attention takes its longest query block, 256, from 768 queries on."""
_TRIANGLE = 128
"""A causal square is halved down to this. CPU flash attention computes all 512 keys of a block that it touches."""
_BIAS_ELEMENTS = 1 << 20
"""Most elements of a mask turned into a bias at a time: 4 MiB in float32."""

Piece = tuple[range, range, bool]
"""Queries, the keys that they attend to as positions in the chunk, and whether query i sees only the first i + 1."""


def expanded_attention_aten(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    workspace_tokens: int,
) -> tuple[Tensor, Tensor]:
    """`mla::expanded_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    _check(q, latent, k_rope, w_uk, w_uv, mask, workspace_tokens)
    batch, query_count, heads, _ = q.shape
    o = q.new_zeros((batch, query_count, heads, w_uv.shape[1]))
    lse = q.new_empty((batch, query_count, heads), dtype=torch.float32)
    for b in range(batch):
        for start in range(0, heads, _HEADS):
            group = slice(start, start + _HEADS)
            seen = mask
            if seen is not None and seen.shape[0] != 1:
                seen = seen[b : b + 1]
            if seen is not None and seen.shape[1] != 1:
                seen = seen[:, group]
            _attend_sequence(
                q[b, :, group].transpose(0, 1),
                (latent[b], k_rope[b]),
                (w_uk[group], w_uv[group]),
                Visibility(seen, causal_offset, latent.shape[1], latent.device),
                scale,
                workspace_tokens,
                out=(o[b, :, group].transpose(0, 1), lse[b, :, group].transpose(0, 1)),
            )
    return o, lse


def _attend_sequence(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
    workspace_tokens: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """q `[H, Sq, P + R]`; cache `[T, L]`, `[T, R]`; weights `[H, P, L]`, `[H, V, L]`; out `[H, Sq, V]` of 0, `[H, Sq]`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    w_uk, w_uv = (w.to(dtype) for w in weights)
    heads, query_count, width = q.shape
    o = out[0] if out[0].dtype == dtype else out[0].new_zeros(out[0].shape, dtype=dtype)
    lse = o.new_full((heads, query_count), -torch.inf)
    keys = visibility.keys(range(query_count))
    shape = heads, min(workspace_tokens, len(keys)), max(width, w_uv.shape[1])
    k_workspace, v_workspace = o.new_zeros(shape), o.new_zeros(shape)
    for chunk in _chunks(visibility, keys, workspace_tokens):
        k, v = k_workspace[:, : len(chunk)], v_workspace[:, : len(chunk)]
        _expand(cache, (w_uk, w_uv), visibility, range(query_count), chunk, out=(k, v))
        for queries, seen, triangle in _pieces(visibility, chunk, query_count):
            bias = None if triangle else _bias(visibility, queries, chunk, dtype)
            if bias is not None and visibility.hidden(bias):
                continue
            rows = slice(queries.start, queries.stop)
            part = slice(seen.start, seen.stop)
            q_rows = torch.nn.functional.pad(q[:, rows].to(dtype), (0, shape[2] - width))
            o_part, lse_part = _attend(q_rows, k[:, part], v[:, part], bias, triangle, scale)
            o[:, rows].lerp_(o_part[..., : w_uv.shape[1]], share_of_second(lse[:, rows], lse_part)[..., None])
            lse[:, rows] = torch.logaddexp(lse[:, rows], lse_part)
    if o is not out[0]:
        out[0].copy_(o)
    out[1].copy_(lse)
