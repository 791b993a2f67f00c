"""Device functions of attention over latents: an online softmax of one tile of keys against one tile of rows.

A row is a head of a query. The rank L is cut into two `blocks` of columns, A and B, with an accumulator each.

    q         [ROWS, A], [ROWS, B], [ROWS, ROPE]
    keys      [KEYS, A], [KEYS, B], [KEYS, ROPE]    loaded once; the latents serve as keys and as values
    state     m [ROWS], total [ROWS], acc [ROWS, A], [ROWS, B]    float32, unnormalised

Scores are in natural units (not in units of log2), so that a mask of the lowest finite number stays finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import add_products, load_rows

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32, not -inf: a row without a key then gets exp(-inf), not NaN."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def aligned(stride, ALIGN: tl.constexpr):
    """A stride that the compiler can see is divisible by ALIGN, so that a thread may load ALIGN elements at a time."""
    if ALIGN > 1:
        stride = stride // ALIGN * ALIGN
    return stride


@triton.jit
def rows_at(base, first, second, stride_0, stride_1, nothing, RUN: tl.constexpr, ROWS: tl.constexpr):
    """A pointer and the offsets of ROWS rows `[first, second]`.

    With RUN the rows are consecutive, and both indices are scalars, those of the first row. `nothing` is a 0 computed
    in the loop in which the compiler should leave the offsets.
    """
    if RUN:
        base += first * stride_0 + second.to(tl.int64) * stride_1
        offsets = (tl.arange(0, ROWS) + nothing).to(tl.int64) * stride_1
    else:
        offsets = first * stride_0 + second.to(tl.int64) * stride_1
    return base, offsets


@triton.jit
def load_tile(corner, start, row_stride, column_stride, seen, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `[ROWS, COLUMNS]` of a mask, 0 where not `seen`: rows from `corner` on, columns from `start` on.

    A scalar address plus small offsets that are the same for each tile: a tile of addresses would take all registers.
    """
    base = corner + (start + tl.full([], 0, tl.int64)) * column_stride
    entries = (tl.arange(0, ROWS) * row_stride)[:, None] + (tl.arange(0, COLUMNS) * column_stride)[None, :]
    return tl.load(base + entries, mask=seen, other=0)


@triton.jit
def from_e4m3(bits, NATIVE: tl.constexpr):
    """FP8 (e4m3fn) bytes as float32. Without hardware conversion, by the bits of a float16 2^8 times smaller."""
    if NATIVE:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = bits.to(tl.uint16)
        magnitude = wide & 0x7F
        half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
        value = tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return value


@triton.jit
def in_order(codes):
    """The numbers of 4 bits `[KEYS, COLUMNS]`, int8, of bytes `[KEYS, COLUMNS / 2]` with two of them plus 8 in each."""
    both = tl.join((codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)) - 8
    return tl.reshape(both, (codes.shape[0], codes.shape[1] * 2))


@triton.jit
def load_latents(
    base,
    offsets,
    seen,
    scales,
    scale_offsets,
    scale_stride,
    dtype: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CODED: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    SAME: tl.constexpr,
):
    """Load `[KEYS, BLOCK]` in `dtype`.

    FP8 bytes, int8 and int4 are multiplied with the scale of their group of GROUP columns: CODED is how many of them an
    element holds, 0 for other numbers. SAME, a power of two, is the number of neighbouring columns that one loaded
    scale is broadcast to.
    """
    if CODED == 2:
        values = in_order(load_rows(base, offsets, seen, FIRST // 2, WIDTH // 2, BLOCK // 2))
    else:
        values = load_rows(base, offsets, seen, FIRST, WIDTH, BLOCK)
    if CODED:
        KEYS: tl.constexpr = values.shape[0]
        RUNS: tl.constexpr = BLOCK // SAME
        column = FIRST + tl.arange(0, RUNS) * SAME
        mask = seen[:, None] & (column < WIDTH)[None, :]
        scale = scales + scale_offsets[:, None] + (column // GROUP * scale_stride)[None, :]
        scale = tl.load(scale, mask=mask, other=0.0)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (KEYS, RUNS, SAME)), (KEYS, BLOCK))
        wide = values.to(tl.float32) if values.dtype == tl.int8 else from_e4m3(values, NATIVE)
        values = (wide * scale).to(dtype)
    return values


@triton.jit
def scores_of_latents(
    q_a,
    q_b,
    base,
    offsets,
    seen,
    scales,
    scale_offsets,
    scale_stride,
    scale,
    L: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    CODED: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    SAME_A: tl.constexpr,
    SAME_B: tl.constexpr,
):
    """Load a tile of latents: their part of the scores `[ROWS, KEYS]`, and themselves, `[KEYS, A]` and `[KEYS, B]`.

    Each product is scaled by itself: with 64 rows on Hopper, one that goes on with the sums of another takes more
    registers than there are.
    """
    a = load_latents(
        *(base, offsets, seen, scales, scale_offsets, scale_stride),
        *(q_a.dtype, 0, L, A, CODED, NATIVE, GROUP, SAME_A),
    )
    scores = tl.dot(q_a, tl.trans(a), input_precision="ieee") * scale
    b = a
    if B:
        b = load_latents(
            *(base, offsets, seen, scales, scale_offsets, scale_stride),
            *(q_a.dtype, A, L, B, CODED, NATIVE, GROUP, SAME_B),
        )
        scores += tl.dot(q_b, tl.trans(b), input_precision="ieee") * scale
    return scores, a, b


@triton.jit
def scores_of_rope(
    q_r,
    base,
    offsets,
    seen,
    scales,
    scale_offsets,
    scale_stride,
    scale,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    CODED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load a tile of rope keys `[KEYS, ROPE]`: their part of the scores `[ROWS, KEYS]`."""
    k = load_latents(
        *(base, offsets, seen, scales, scale_offsets, scale_stride),
        *(q_r.dtype, 0, R, ROPE, CODED, NATIVE, R, ROPE),
    )
    return tl.dot(q_r, tl.trans(k), input_precision="ieee") * scale


@triton.jit
def add_keys(m, total, acc_a, acc_b, scores, a, b, B: tl.constexpr):
    """Add one more tile of keys to the state: scores `[ROWS, KEYS]`, -inf where hidden; a and b are the latents."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    weights = tl.exp2((scores - m_new[:, None]) * LOG2E)
    decay = tl.exp2((m - m_new) * LOG2E)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(a.dtype)
    acc_a, acc_b = add_products(acc_a * decay[:, None], acc_b * decay[:, None], weights, a, b, B)
    return m_new, total, acc_a, acc_b
