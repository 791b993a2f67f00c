"""Chunked MLA, independent of what attends to a chunk: up-project, attend, merge with the result of earlier chunks.

For one sequence and one group of heads at a time, the keys and values of at most `workspace_tokens` tokens are
up-projected into a workspace; every query that sees some of them attends to them, and merges the result into its state:

    latent  [C, L]                      a view of the cache, or a copy of the chunk in another dtype or from pages
    k, v    [H, C, P], [H, C, V]        the workspace, in the dtype of the arithmetic
    o, lse  [H, Sq, V], [H, Sq]         in at least float32

With a causal offset alone, chunks are cut so that each is either entirely visible to all queries, or starts at the last
key that some query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...score_spacing import lost_in_ops
from ..even import even
from ..two_latents import latents_of
from ..visibility import KeyPositions, Visibility, reads_values, split, take
from .arguments import ExpandedAttention, Expansion

HEADS = 16
"""Heads at a time. Bounds the workspace of a model with 128 heads; the weights of 16 heads are a few MB in float32."""
_MASKED_QUERIES = 256
"""Queries at a time under a mask. Tiles that the mask hides entirely are skipped, so they should be small."""
_BIAS_ELEMENTS = 1 << 20
"""The most mask elements turned into a bias at a time: 4 MiB in float32."""
_CACHE_LINE = 64
"""Bytes."""


Load = Callable[[slice, KeyPositions, torch.dtype], tuple[Tensor, Tensor]]
"""Latents `[C, L]` of a sequence, and rope keys `[C, 1 or H, R]` of some heads, at some positions and in a dtype."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of a chunk: nope `[H, C, P]`, rope `[1 or H, C, R]`, v `[H, C, V]`, of any strides."""

    nope: Tensor
    rope: Tensor
    v: Tensor


class Arithmetic(Protocol):
    """How a chunk is up-projected and attended to."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of latents, weights, keys and values."""

    @property
    def queries(self) -> torch.dtype:
        """The dtype of the queries."""

    def attend(
        self,
        q: Tensor,
        keys: Keys,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """Let all queries attend to one chunk, and merge the result into the state.

        q `[H, Sq, P + R]`, last stride 1; state is o `[H, Sq, V]` and lse `[H, Sq]`, updated in place.
        """


def attend_in_chunks(x: ExpandedAttention, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """o and lse of `mla::expanded_attention`."""
    q, mask, level = leveled(x.q, x.mask)
    if len(q) > 1:  # else each sequence would cast and copy the weights of its groups of heads
        w_uk, w_uv = (w.to(arithmetic.dtype).contiguous() for w in (x.w_uk, x.w_uv))
        x = replace(x, w_uk=w_uk, w_uv=w_uv)
    o = q.new_zeros((*q.shape[:3], x.w_uv.shape[1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for b in range(q.shape[0]):

        def load(heads: slice, keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            ropes = x.ropes[b] if x.ropes.shape[2] == 1 else x.ropes[b, :, heads]
            return take(x.latent[b], keys, 0).to(dtype), take(ropes, keys, 0).to(dtype)

        seen = mask if mask is None or mask.shape[0] == 1 else mask[b : b + 1]
        visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
        attend_sequence(x, q[b], load, visibility, arithmetic, out=(o[b], lse[b]))
    return o, lse if level is None else lse.add_(level)


def attend_sequence(
    x: Expansion, q: Tensor, load: Load, visibility: Visibility, arithmetic: Arithmetic, out: tuple[Tensor, Tensor]
) -> None:
    """Fill `out`, o `[Sq, N, V]` (zeros at first) and lse `[Sq, N]`, with the attention of one sequence.

    Goes through the heads in groups. q `[Sq, N, P + R]` and a floating mask are as `leveled` returns them; weights,
    scale and workspace are the bundle's.
    """
    for start in range(0, q.shape[1], HEADS):
        group = slice(start, start + HEADS)
        w_uk, w_uv = (w[group].to(arithmetic.dtype) for w in (x.w_uk, x.w_uv))
        attend_heads(
            q[:, group].transpose(0, 1),
            partial(load, group),
            partial(Workspace, w_uk, w_uv),
            of_heads(visibility, group),
            x.scale,
            x.workspace_tokens,
            arithmetic,
            out=(out[0][:, group].transpose(0, 1), out[1][:, group].transpose(0, 1)),
        )


def of_heads(visibility: Visibility, heads: slice) -> Visibility:
    """What the queries of some heads may attend to."""
    mask = visibility.mask
    return visibility if mask is None or mask.shape[1] == 1 else replace(visibility, mask=mask[:, heads])


def masked_tiles(
    visibility: Visibility, chunk: KeyPositions, queries: range, dtype: torch.dtype
) -> Iterator[tuple[range, Tensor | None]]:
    """Yield tiles of those queries that see some of the chunk's keys, each with the mask's bias for it (None for
    nothing)."""
    assert visibility.mask is not None
    step = max(min(_MASKED_QUERIES, _BIAS_ELEMENTS // (visibility.mask.shape[1] * len(chunk))), 1)
    for start in range(0, len(queries), step):
        tile = queries[start : start + step]
        bias = visibility.bias(tile, chunk, dtype)
        if bias is None or not reads_values(bias) or not bool((bias == -torch.inf).all()):
            yield tile, bias


def leveled(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Shift mask rows that hide every key by finite numbers up to 0: new queries, new mask, and the shift of each lse.

    Added to -1e30, say, a score is lost, so the queries of such rows may be set to 0. The number of keys in a chunk
    would be lost from the lse in the same way, and chunks are merged by it; hence the shift.
    """
    if mask is None or mask.dtype == torch.bool or mask.shape[3] == 0:
        return q, mask, None
    lost, level = lost_rows(q.dtype, mask)
    if reads_values(lost) and not lost.any():
        return q, mask, None
    return q.masked_fill(lost.transpose(1, 2), 0.0), mask - level, level.squeeze(-1).transpose(1, 2)


def lost_rows(dtype: torch.dtype, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of a mask have only numbers that outweigh scores of `dtype`, `[B|1, N|1, Sq|1, 1]`, and the greatest
    number of those rows, 0 for all others. Rows of -inf alone are not among them."""
    peak = mask.amax(-1, keepdim=True)
    lost = (peak <= lost_in_ops(dtype)) & peak.isfinite()
    return lost, peak.masked_fill(~lost, 0.0)


def attend_heads(
    q: Tensor,
    load: Callable[[KeyPositions, torch.dtype], tuple[Tensor, Tensor]],
    expansion: Callable[[int], Workspace],
    visibility: Visibility,
    scale: float,
    workspace_tokens: int,
    arithmetic: Arithmetic,
    out: tuple[Tensor, Tensor],
) -> None:
    """Fill `out`, o `[H, Sq, V]` (zeros at first) and lse `[H, Sq]`.

    q `[H, Sq, P + R]`; `expansion` is given the most tokens of a chunk.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    query_count = q.shape[1]
    q = q.to(arithmetic.queries)
    if q.stride(2) != 1:
        q = q.contiguous()
    o = out[0] if out[0].dtype == dtype else out[0].new_zeros(out[0].shape, dtype=dtype)
    lse = o.new_full(q.shape[:2], -torch.inf)
    positions = visibility.keys(range(query_count))
    workspace = expansion(min(workspace_tokens, len(positions)))
    for chunk in _chunks(visibility, positions, workspace_tokens):
        latent, ropes = load(chunk, arithmetic.dtype)
        blanks = visibility.blanks(range(query_count), chunk)
        if blanks is not None:
            latent = latent.masked_fill(blanks[0][:, None], 0.0)
            ropes = ropes.masked_fill(blanks[0][:, None, None], 0.0)
        arithmetic.attend(q, workspace.expand(latent, ropes), visibility, chunk, scale, (o, lse))
    if o is not out[0]:
        out[0].copy_(o)
    out[1].copy_(lse)


def _chunks(visibility: Visibility, keys: KeyPositions, size: int) -> Iterator[KeyPositions]:
    """The keys, at most `size` at a time; under a causal limit alone, also cut at the last key that query 0 sees."""
    cut = visibility.causal_offset if visibility.mask is None else None
    cut = 0 if cut is None else max(cut, 0)
    yield from split(keys[:cut], size)
    yield from split(keys[cut:], size)


class Workspace:
    """Memory for the keys and values of a group of heads, of at most `size` tokens at a time.

    Keys are laid out `[C, H, P]` and values `[H, V, C]`: a single product writes each in that layout, and the product
    that uses it can read it so. Rows are a cache line apart, as rows whose size is a power of two would all compete for
    the same few lines of a cache.
    """

    def __init__(self, w_uk: Tensor, w_uv: Tensor, size: int) -> None:
        self._w_uk, self._w_uv = w_uk, w_uv
        self._of_keys, self._of_values = (even(w.flatten(0, 1)) for w in (w_uk, w_uv))
        self._gap = _CACHE_LINE // w_uk.itemsize
        self._k = w_uk.new_empty(size * (self._of_keys.shape[0] + self._gap))
        self._v = w_uv.new_empty(self._of_values.shape[0] * (size + self._gap))

    def expand(self, latent: Tensor, ropes: Tensor) -> Keys:
        """Up-project latents `[C, L]`, beside rope keys `[C, 1 or H, R]`."""
        k = self._rows(self._k, latent.shape[0], self._of_keys.shape[0])
        v = self._rows(self._v, self._of_values.shape[0], latent.shape[0])
        below_keys, below_values = map(even, latents_of(latent, self._w_uk, self._w_uv))
        torch.mm(below_keys, self._of_keys.T, out=k)
        torch.mm(self._of_values, below_values.T, out=v)
        nope, values = k.unflatten(1, self._w_uk.shape[:2]), v.unflatten(0, self._w_uv.shape[:2])
        return Keys(nope.transpose(0, 1), ropes.transpose(0, 1), values.transpose(1, 2))

    def _rows(self, memory: Tensor, rows: int, columns: int) -> Tensor:
        return memory[: rows * (columns + self._gap)].view(rows, -1)[:, :columns]
