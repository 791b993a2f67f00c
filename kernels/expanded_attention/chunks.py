"""Chunked MLA, whatever attends to a chunk: up-project, attend, and add to what earlier chunks gave.

A sequence and a group of heads at a time, the keys and values of at most `workspace_tokens` tokens are up-projected
into a workspace, every query that sees some of them attends to them, and the result is merged with what it has:

    latent  [C, L]                      a view of the cache, or a copy of the chunk in another dtype or from pages
    k, v    [H, C, P], [H, C, V]        the workspace, in the dtype of the arithmetic
    o, lse  [H, Sq, V], [H, Sq]         in at least float32

With a causal offset alone, chunks are cut so that each is either seen whole by all queries, or starts where some
query's view ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..scores import lowest
from ..visibility import KeyPositions, Visibility, reads_values, split, take
from .arguments import ExpandedAttention, Expansion

_HEADS = 16
"""Heads at a time. Bounds the workspace of a model of 128 heads; the weights of 16 are a few MB in float32."""
_MASKED_QUERIES = 256
"""Queries at a time under a mask: a tile of a mask that hides all of it is skipped, so tiles are to be small."""
_BIAS_ELEMENTS = 1 << 20
"""Most elements of a mask turned into a bias at a time: 4 MiB in float32."""
_CACHE_LINE = 64
"""Bytes."""


Load = Callable[[KeyPositions, torch.dtype], tuple[Tensor, Tensor]]
"""The latents `[C, L]` and rope keys `[C, R]` of a sequence at some positions, in a dtype."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of a chunk: nope `[H, C, P]`, rope `[C, R]`, v `[H, C, V]`, of any strides."""

    nope: Tensor
    rope: Tensor
    v: Tensor


class Arithmetic(Protocol):
    """How a chunk is up-projected and attended to."""

    @property
    def dtype(self) -> torch.dtype:
        """Of latents, weights, keys and values."""

    @property
    def queries(self) -> torch.dtype:
        """Of the queries."""

    def attend(
        self,
        q: Tensor,
        keys: Keys,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """Attention of all queries to one chunk, merged into what earlier chunks gave.

        q `[H, Sq, P + R]`, last stride 1; state, o `[H, Sq, V]` and lse `[H, Sq]`, in place.
        """


def attend_in_chunks(x: ExpandedAttention, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """o and lse of `mla::expanded_attention`."""
    q, mask, level = leveled(x.q, x.mask)
    o = q.new_zeros((*q.shape[:3], x.w_uv.shape[1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for b in range(q.shape[0]):

        def load(keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            return take(x.latent[b], keys, 0).to(dtype), take(x.k_rope[b], keys, 0).to(dtype)

        seen = mask if mask is None or mask.shape[0] == 1 else mask[b : b + 1]
        visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
        attend_sequence(x, q[b], load, visibility, arithmetic, out=(o[b], lse[b]))
    return o, lse if level is None else lse.add_(level)


def attend_sequence(
    x: Expansion, q: Tensor, load: Load, visibility: Visibility, arithmetic: Arithmetic, out: tuple[Tensor, Tensor]
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
            arithmetic,
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


def _attend_heads(
    q: Tensor,
    load: Load,
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
    workspace_tokens: int,
    arithmetic: Arithmetic,
    out: tuple[Tensor, Tensor],
) -> None:
    """Fill out, `[H, Sq, V]` (of zeros) and `[H, Sq]`.

    q `[H, Sq, P + R]`, weights `[H, P, L]` and `[H, V, L]`.
    """
    w_uk, w_uv = (w.to(arithmetic.dtype) for w in weights)
    dtype = torch.promote_types(q.dtype, torch.float32)
    query_count = q.shape[1]
    q = q.to(arithmetic.queries)
    if q.stride(2) != 1:
        q = q.contiguous()
    o = out[0] if out[0].dtype == dtype else out[0].new_zeros(out[0].shape, dtype=dtype)
    lse = o.new_full(q.shape[:2], -torch.inf)
    positions = visibility.keys(range(query_count))
    workspace = Workspace(w_uk, w_uv, min(workspace_tokens, len(positions)))
    for chunk in _chunks(visibility, positions, workspace_tokens):
        latent, k_rope = load(chunk, arithmetic.dtype)
        blanks = visibility.blanks(range(query_count), chunk)
        if blanks is not None:
            latent, k_rope = (part.masked_fill(blanks[0][:, None], 0.0) for part in (latent, k_rope))
        arithmetic.attend(q, workspace.expand(latent, k_rope), visibility, chunk, scale, (o, lse))
    if o is not out[0]:
        out[0].copy_(o)
    out[1].copy_(lse)


def _chunks(visibility: Visibility, keys: KeyPositions, size: int) -> Iterator[KeyPositions]:
    """The keys, at most `size` at a time, cut where a causal limit alone starts to hide some."""
    cut = visibility.causal_offset if visibility.mask is None else None
    cut = 0 if cut is None else max(cut, 0)
    yield from split(keys[:cut], size)
    yield from split(keys[cut:], size)


class Workspace:
    """Memory for the keys and values of a group of heads, of at most `size` tokens at a time.

    Keys lie `[C, H, P]` and values `[H, V, C]`: each is what a single product gives, and the product with it takes. A
    cache line is left out between rows: those of powers of two would all fall into the same few lines of a cache.
    """

    def __init__(self, w_uk: Tensor, w_uv: Tensor, size: int) -> None:
        self._w_uk, self._w_uv = (_even(w.reshape(-1, w.shape[2])) for w in (w_uk, w_uv))
        self._heads = w_uk.shape[0]
        self._gap = _CACHE_LINE // w_uk.itemsize
        self._k = w_uk.new_empty(size * (self._w_uk.shape[0] + self._gap))
        self._v = w_uv.new_empty(self._w_uv.shape[0] * (size + self._gap))

    def expand(self, latent: Tensor, k_rope: Tensor) -> Keys:
        """Up-project latents `[C, L]`."""
        k = self._rows(self._k, latent.shape[0], self._w_uk.shape[0])
        v = self._rows(self._v, self._w_uv.shape[0], latent.shape[0])
        latent = _even(latent)
        torch.mm(latent, self._w_uk.T, out=k)
        torch.mm(self._w_uv, latent.T, out=v)
        nope, values = k.unflatten(1, (self._heads, -1)), v.unflatten(0, (self._heads, -1))
        return Keys(nope.transpose(0, 1), k_rope, values.transpose(1, 2))

    def _rows(self, memory: Tensor, rows: int, columns: int) -> Tensor:
        return memory[: rows * (columns + self._gap)].view(rows, -1)[:, :columns]


def _even(rows: Tensor) -> Tensor:
    """`[., L]`; in half precision a 0 makes L even, as a library that multiplies pairs reads on into the next row."""
    return torch.nn.functional.pad(rows, (0, 1)) if rows.itemsize < 4 and rows.shape[1] % 2 else rows
