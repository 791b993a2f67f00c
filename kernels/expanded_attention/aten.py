"""Chunked MLA from ATen operations: flash attention on CPU, products and a softmax elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..merge_states.aten import share_of_second
from ..scores import causal_mask, softmax_with_lse
from ..visibility import KeyPositions, Visibility
from .arguments import ExpandedAttention
from .chunks import Keys, attend_in_chunks, masked_tiles

_QUERIES = 1024
"""Queries at a time. CPU flash attention uses its longest query block, 256, from 768 queries on."""
_TRIANGLE = 128
"""Causal squares are halved down to this many keys, as CPU flash attention computes all 512 keys of any block that it
touches."""

Piece = tuple[range, range, bool, Tensor | None]
"""Queries, the keys that they attend to as positions in the chunk, whether the i-th of these queries sees only the
first i + 1 keys, and what to add to the scores."""


def attend(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    return attend_in_chunks(x, Flash.of(x.q.dtype))


@dataclass(frozen=True)
class Flash:
    """`Arithmetic` in at least float32: one piece of the queries at a time, merged by the log-sum-exp."""

    dtype: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Flash:
        """The arithmetic for queries of `dtype`."""
        return cls(torch.promote_types(dtype, torch.float32))

    @property
    def queries(self) -> torch.dtype:
        return self.dtype

    def attend(
        self,
        q: Tensor,
        keys: Keys,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """See `Arithmetic`. Flash attention needs the two parts of the keys in one tensor."""
        k = torch.cat([keys.nope, keys.rope.expand(q.shape[0], -1, -1)], dim=2)
        _attend_to_chunk(q, k, keys.v.contiguous(), visibility, chunk, scale, state)


def _attend_to_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    chunk: KeyPositions,
    scale: float,
    state: tuple[Tensor, Tensor],
) -> None:
    """Attend to a chunk and merge the result into the state, as in `Arithmetic`.

    q `[H, Sq, P + R]`, k `[H, C, P + R]`, v `[H, C, V]`, all with a last stride of 1.
    """
    o, lse = state
    for queries, seen, triangle, bias in _pieces(visibility, chunk, q.shape[1], q.dtype):
        rows = slice(queries.start, queries.stop)
        part = slice(seen.start, seen.stop)
        o_part, lse_part = _attend(q[:, rows], k[:, part], v[:, part], bias, triangle, scale)
        o[:, rows].lerp_(o_part, share_of_second(lse[:, rows], lse_part)[..., None])
        lse[:, rows] = torch.logaddexp(lse[:, rows], lse_part)


def _pieces(visibility: Visibility, chunk: KeyPositions, query_count: int, dtype: torch.dtype) -> Iterator[Piece]:
    """The pieces to compute for a chunk, in tiles of queries.

    Under a causal offset alone they are a triangle, for flash attention's own causal flag, and a rectangle below it.
    """
    every = range(len(chunk))
    if visibility.mask is not None:
        for queries, bias in masked_tiles(visibility, chunk, range(query_count), dtype):
            yield queries, every, False, bias
        return
    assert isinstance(chunk, range)
    offset = visibility.causal_offset
    if offset is None or chunk.stop - 1 <= offset:
        yield from ((queries, every, False, None) for queries in _tiles(range(query_count)))
        return
    first = chunk.start - offset
    corner = range(first, min(first + len(chunk), query_count))
    yield from _triangle(corner, every)
    yield from ((queries, every, False, None) for queries in _tiles(range(corner.stop, query_count)))


def _tiles(queries: range) -> Iterator[range]:
    for start in range(0, len(queries), _QUERIES):
        yield queries[start : start + _QUERIES]


def _triangle(queries: range, keys: range) -> Iterator[Piece]:
    """Split a causal square into a rectangle, its lower left quarter, and the two smaller squares on its diagonal."""
    if len(keys) <= _TRIANGLE:
        yield queries, keys, True, None
        return
    half = len(keys) // 2
    yield from _triangle(queries[:half], keys[:half])
    if len(queries) > half:
        yield queries[half:], keys[:half], False, None
        yield from _triangle(queries[half:], keys[half:])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q `[H, s, D]`, k `[H, C, D]`, v `[H, C, V]`, bias `[1, H or 1, s or 1, C]` or None; o `[H, s, V]`, lse `[H, s]`.

    CPU flash attention assumes a last stride of 1, which q, k and v have, and requires D = V.
    """
    if not q.is_cpu:
        return _attend_composed(q, k, v, bias, triangle, scale)
    if bias is not None:
        bias = bias.contiguous()
    if triangle and scale <= 0:  # torch multiplies by it the -inf of the keys that the flag hides
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    columns = v.shape[2]
    width = max(q.shape[2], columns)
    q, k, v = (torch.nn.functional.pad(t, (0, width - t.shape[2])) for t in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], is_causal=triangle, attn_mask=bias, scale=scale
    )
    if bias is not None:
        # For a row with nothing to attend to, flash attention returns o = 0, but lse = 0 instead of -inf.
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return o[0, ..., :columns], lse[0]


def _attend_composed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Like `_attend`, for devices without a flash attention that returns lse for any widths."""
    causal = causal_mask(q.shape[1], k.shape[1], 0, q.device) if triangle else None
    weights, lse = softmax_with_lse(scale * (q @ k.mT)[None], bias, causal)
    return weights[0] @ v, lse[0]


expanded_attention_aten = checked(ExpandedAttention, attend)
implement("expanded_attention", "CompositeExplicitAutograd", expanded_attention_aten)
