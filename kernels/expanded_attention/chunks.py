"""Chunked MLA, whatever attends to a chunk: up-project, attend, and add to what earlier chunks gave.

A sequence and a group of heads at a time, the keys and values of at most `workspace_tokens` tokens are up-projected
into a workspace, every query that sees some of them attends to them, and the result is merged with what it has:

    latent  [C, L]                      a view of the cache; a copy of the chunk for half precision, FP8 and pages
    k, v    [H, C, P + R], [H, C, V]    the workspace, float32 for half precision
    o, lse  [H, Sq, V], [H, Sq]

With a causal offset alone, chunks are cut so that each is either seen whole by all queries, or starts where some
query's view ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..visibility import KeyPositions, Visibility, reads_values, split, take
from .arguments import ExpandedAttention, Expansion

_HEADS = 16
"""Heads at a time. Bounds the workspace of a model of 128 heads; the weights of 16 are a few MB in float32."""
_MASKED_QUERIES = 256
"""Queries at a time under a mask: a tile of a mask that hides all of it is skipped, so tiles are to be small."""
_BIAS_ELEMENTS = 1 << 20
"""Most elements of a mask turned into a bias at a time: 4 MiB in float32."""
_SPACING = 8.0
"""Where floats are this far apart, adding a score changes nothing that a softmax could show."""


Load = Callable[[KeyPositions, torch.dtype], tuple[Tensor, Tensor]]
"""The latents `[C, L]` and rope keys `[C, R]` of a sequence at some positions, in a dtype."""


class Attend(Protocol):
    """Attention of all queries to one chunk, merged into what earlier chunks gave."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """q `[H, Sq, P + R]`, k `[H, C, P + R]`, v `[H, C, V]`; state, o `[H, Sq, V]` and lse `[H, Sq]`, in place.

        All are of one dtype and have a last stride of 1.
        """


def attend_in_chunks(x: ExpandedAttention, attend: Attend) -> tuple[Tensor, Tensor]:
    """o and lse of `mla::expanded_attention` by `attend`."""
    q, mask, level = leveled(x.q, x.mask)
    o = q.new_zeros((*q.shape[:3], x.w_uv.shape[1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for b in range(q.shape[0]):

        def load(keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            return take(x.latent[b], keys, 0).to(dtype), take(x.k_rope[b], keys, 0).to(dtype)

        seen = mask if mask is None or mask.shape[0] == 1 else mask[b : b + 1]
        visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
        attend_sequence(x, q[b], load, visibility, attend, out=(o[b], lse[b]))
    return o, lse if level is None else lse.add_(level)


def attend_sequence(
    x: Expansion, q: Tensor, load: Load, visibility: Visibility, attend: Attend, out: tuple[Tensor, Tensor]
) -> None:
    """Fill out, `[Sq, N, V]` (of zeros) and `[Sq, N]`, with the attention of one sequence, a group of heads at a time.

    q `[Sq, N, P + R]` and a floating mask are those that `leveled` gave; weights, scale and workspace are the bundle's.
    """
    for start in range(0, q.shape[1], _HEADS):
        group = slice(start, start + _HEADS)
        mask = visibility.mask
        if mask is not None and mask.shape[1] != 1:
            mask = mask[:, group]
        _attend_heads(
            q[:, group].transpose(0, 1),
            load,
            (x.w_uk[group], x.w_uv[group]),
            replace(visibility, mask=mask),
            x.scale,
            x.workspace_tokens,
            attend,
            out=(out[0][:, group].transpose(0, 1), out[1][:, group].transpose(0, 1)),
        )


def masked_tiles(
    visibility: Visibility, chunk: KeyPositions, query_count: int, dtype: torch.dtype
) -> Iterator[tuple[range, Tensor | None]]:
    """Queries of which some see some of the chunk's keys, and what the mask adds to their scores (None: nothing)."""
    assert visibility.mask is not None
    step = max(min(_MASKED_QUERIES, _BIAS_ELEMENTS // (visibility.mask.shape[1] * len(chunk))), 1)
    for start in range(0, query_count, step):
        queries = range(start, min(start + step, query_count))
        bias = visibility.bias(queries, chunk, dtype)
        if bias is None or not reads_values(bias) or not bool((bias == -torch.inf).all()):
            yield queries, bias


def leveled(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Bring rows that finite numbers hide from every key up to 0: queries, mask, and what the rows' lse lacks now.

    At -1e30 nothing is left of a score, so the queries may be 0, and nothing of how many keys a chunk had in its lse,
    which is what chunks are merged by.
    """
    if mask is None or mask.dtype == torch.bool or mask.shape[3] == 0:
        return q, mask, None
    lost, level = lost_rows(q.dtype, mask)
    if reads_values(lost) and not lost.any():
        return q, mask, None
    return q.masked_fill(lost.transpose(1, 2), 0.0), mask - level, level.squeeze(-1).transpose(1, 2)


def lost_rows(dtype: torch.dtype, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a mask whose finite numbers outweigh scores of `dtype`, `[B|1, N|1, Sq|1, 1]`, and their greatest number,
    0 for all other rows."""
    peak = mask.amax(-1, keepdim=True)
    lost = (peak <= lowest(dtype)) & peak.isfinite()
    return lost, peak.masked_fill(~lost, 0.0)


def lowest(dtype: torch.dtype) -> float:
    """Where nothing is left of a score of `dtype` that is added."""
    return -_SPACING / torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _attend_heads(
    q: Tensor,
    load: Load,
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
    workspace_tokens: int,
    attend: Attend,
    out: tuple[Tensor, Tensor],
) -> None:
    """Fill out, `[H, Sq, V]` (of zeros) and `[H, Sq]`.

    q `[H, Sq, P + R]`, weights `[H, P, L]` and `[H, V, L]`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    w_uk, w_uv = (w.to(dtype) for w in weights)
    heads, query_count, width = q.shape
    q = q.to(dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    o = out[0] if out[0].dtype == dtype else out[0].new_zeros(out[0].shape, dtype=dtype)
    lse = o.new_full((heads, query_count), -torch.inf)
    keys = visibility.keys(range(query_count))
    size = min(workspace_tokens, len(keys))
    k_workspace, v_workspace = o.new_empty((heads, size, width)), o.new_empty((heads, size, w_uv.shape[1]))
    for chunk in _chunks(visibility, keys, workspace_tokens):
        k, v = k_workspace[:, : len(chunk)], v_workspace[:, : len(chunk)]
        _expand(load, (w_uk, w_uv), visibility, range(query_count), chunk, out=(k, v))
        attend(q, k, v, visibility, chunk, scale, (o, lse))
    if o is not out[0]:
        out[0].copy_(o)
    out[1].copy_(lse)


def _chunks(visibility: Visibility, keys: KeyPositions, size: int) -> Iterator[KeyPositions]:
    """The keys, at most `size` at a time, cut where a causal limit alone starts to hide some."""
    cut = visibility.causal_offset if visibility.mask is None else None
    cut = 0 if cut is None else max(cut, 0)
    yield from split(keys[:cut], size)
    yield from split(keys[cut:], size)


def _expand(
    load: Load,
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    queries: range,
    chunk: KeyPositions,
    out: tuple[Tensor, Tensor],
) -> None:
    """Up-project a chunk into k `[H, C, P + R]` and v `[H, C, V]`."""
    k, v = out
    latent, k_rope = load(chunk, k.dtype)
    blanks = visibility.blanks(queries, chunk)
    if blanks is not None:
        latent, k_rope = (part.masked_fill(blanks[0][:, None], 0.0) for part in (latent, k_rope))
    for width, w, columns in ((weights[0].shape[1], weights[0], k), (weights[1].shape[1], weights[1], v)):
        torch.bmm(latent.expand(w.shape[0], -1, -1), w.transpose(1, 2), out=columns[..., :width])
    k[..., weights[0].shape[1] : weights[0].shape[1] + k_rope.shape[1]] = k_rope
