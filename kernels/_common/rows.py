"""The rows of a tile: which query and head each is, where it lies, and which keys it may see."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of_tile(
    tile,
    group,
    rows,
    queries,
    heads,
    SOURCE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Which rows of a tile exist `[ROWS]`, their sequence `[]`, and the query and head of each `[ROWS]`."""
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    if WHOLE:  # every tile is full, so that no row needs a mask
        exists = row >= 0
    if SOURCE == "named":
        b = (group // queries).to(tl.int64)
        query = row * 0 + group % queries
        head = row
    else:
        b = group.to(tl.int64)
        query = row // heads
        head = row % heads
    return exists, b, query, head


@triton.jit
def last_seen(
    query,
    group,
    starts,
    keys,
    queries,
    causal_offset,
    SOURCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
):
    """The last key that each row may see `[ROWS]`, of `keys` keys."""
    last = query * 0 + keys - 1
    if CAUSAL:
        if SOURCE != "pages":
            last = query + causal_offset
        elif STARTS:
            last = query + tl.load(starts + group).to(tl.int32)
        else:
            last = query + keys - queries
    return last


@triton.jit
def offsets_of_rows(b, query, head, stride_b, stride_s, stride_n):
    """The offset of each row `[ROWS]` in a tensor `[B, Sq, N, ...]`."""
    return b * stride_b + query.to(tl.int64) * stride_s + head.to(tl.int64) * stride_n
