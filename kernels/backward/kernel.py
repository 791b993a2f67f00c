"""The backward of attention to up-projected keys: two kernels, as in FlashAttention 2 (arXiv:2307.08691, algorithm 2).

`add_to_queries` takes a tile of queries of one head of one sequence and goes through the keys that they see. It also
computes what both kernels need of a row; `add_to_keys`, which runs after it, takes a tile of keys and goes through the
queries that see them. Weights are computed again, from the scores and the log-sum-exp of the forward:

    weight     exp(score - lse)
    d_score    weight * (do . v - delta),   delta = do . o - d_lse
    dq         scale * sum over keys of d_score * k;     dk = scale * sum over queries of d_score * q
    dv         sum over queries of weight * do

    q, dq          [B, Sq, H, P + R]                    any strides but 1 in the last dim, the nope part first
    k, dk; v, dv   [B, T, H, P]; [B, T, H, V]           the workspace, contiguous
    rope           [B, T, H, R]                         with a stride of 0 where heads share it
    d_rope         [B, T, H, R]                         contiguous; where heads share rope keys, it is summed later
    o, do          [B, Sq, H, V]                        any strides but 1 in the last dim
    lse, d_lse     [B, Sq, H]                           float32, any strides
    mask           [B, H, Sq, T], any strides, 0 where it broadcasts
    delta, peak, shift   [B, H, Sq]                     float32, contiguous: what is needed of a row

`peak` is the log-sum-exp in units of log2, 0 for a row that sees no key. Numbers that are added to the scores may hide
all keys of a row by a finite amount, to which its log-sum-exp is then rounded. So with these the greatest score is
found again: `peak` is that, and `shift` the log2 of the sum of the row's weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.attend import LOG2E, LOWEST, load_tile
from .._common.blocks import add_products, load_blocks, load_rope, no_sums, product, store_blocks, store_columns

_ANY_VALUE = ("scale", "queries", "heads", "keys", "causal_offset")


@triton.jit
def weights_of(scores, scale, bias, peak, shift, MASK: tl.constexpr):
    """The softmax's weights of unscaled scores; peak and shift are those of their rows."""
    if MASK == "bias":
        return tl.exp2((scores * scale + bias.to(tl.float32) - peak) * LOG2E - shift)
    return tl.exp2(scores * (scale * LOG2E) - peak)


@triton.jit(do_not_specialize=_ANY_VALUE)
def add_to_queries(
    q,
    k,
    rope,
    v,
    mask,
    o,
    do,
    lse,
    d_lse,
    dq,
    delta_out,
    peak_out,
    shift_out,
    scale,
    queries,
    heads,
    keys,
    causal_offset,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    rope_stride_b,
    rope_stride_t,
    rope_stride_n,
    mask_stride_b,
    mask_stride_n,
    mask_stride_s,
    mask_stride_t,
    o_stride_b,
    o_stride_s,
    o_stride_n,
    do_stride_b,
    do_stride_s,
    do_stride_n,
    lse_stride_b,
    lse_stride_s,
    lse_stride_n,
    d_lse_stride_b,
    d_lse_stride_s,
    d_lse_stride_n,
    dq_stride_b,
    dq_stride_s,
    dq_stride_n,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    D_LSE: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_A: tl.constexpr,
    P_B: tl.constexpr,
    ROPE: tl.constexpr,
    V_A: tl.constexpr,
    V_B: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(queries, ROWS)
    # The tiles of one head are neighbours, to find its keys in the second-level cache; the longest come first.
    tile = tiles - 1 - tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles).to(tl.int64)
    b = group // heads
    head = group % heads
    query = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = query < queries
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.minimum(tile * ROWS + ROWS, queries) + causal_offset, keys)

    q_rows = query.to(tl.int64) * q_stride_s
    q += b * q_stride_b + head * q_stride_n
    q_a, q_b = load_blocks(q, q_rows, exists, P, P_A, P_B)  # [ROWS, P_A], [ROWS, P_B]
    q_r = load_rope(q + P, q_rows, exists, q_a, R, ROPE)  # [ROWS, ROPE]
    o += b * o_stride_b + head * o_stride_n
    do += b * do_stride_b + head * do_stride_n
    do_a, do_b = load_blocks(do, query.to(tl.int64) * do_stride_s, exists, V, V_A, V_B)  # [ROWS, V_A], [ROWS, V_B]
    o_a, o_b = load_blocks(o, query.to(tl.int64) * o_stride_s, exists, V, V_A, V_B)
    delta = tl.sum(do_a.to(tl.float32) * o_a.to(tl.float32), 1)
    if V_B:
        delta += tl.sum(do_b.to(tl.float32) * o_b.to(tl.float32), 1)
    if D_LSE:
        d_lse += b * d_lse_stride_b + head * d_lse_stride_n
        delta -= tl.load(d_lse + query.to(tl.int64) * d_lse_stride_s, mask=exists, other=0.0).to(tl.float32)
    k += (b * keys * heads + head) * P
    v += (b * keys * heads + head) * V
    rope += b * rope_stride_b + head * rope_stride_n
    if MASK != "none":
        first_row = (tile * ROWS).to(tl.int64)
        mask += b * mask_stride_b + head * mask_stride_n + first_row * mask_stride_s

    shift = tl.zeros([ROWS], tl.float32)
    if MASK == "bias":
        peak = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, end, KEYS, num_stages=STAGES):
            place = start + tl.arange(0, KEYS)  # [KEYS]
            seen = place < end
            allowed = seen[None, :]
            if CAUSAL:
                allowed = allowed & (place[None, :] <= query[:, None] + causal_offset)
            bias = load_tile(mask, start, mask_stride_s, mask_stride_t, allowed & exists[:, None], ROWS, KEYS)
            offsets = place.to(tl.int64) * heads
            k_a, k_b = load_blocks(k, offsets * P, seen, P, P_A, P_B)
            k_r = load_rope(rope, place.to(tl.int64) * rope_stride_t, seen, k_a, R, ROPE)
            scores = product(q_a, q_b, q_r, k_a, k_b, k_r, P_B, R) * scale + bias.to(tl.float32)
            scores = tl.where(allowed, scores, -float("inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            total = total * tl.exp2((peak - higher) * LOG2E) + tl.sum(tl.exp2((scores - higher[:, None]) * LOG2E), 1)
            peak = higher
        shift = tl.log2(tl.maximum(total, 1.0))
    else:
        lse += b * lse_stride_b + head * lse_stride_n
        peak = tl.load(lse + query.to(tl.int64) * lse_stride_s, mask=exists, other=0.0) * LOG2E
        peak = tl.where(peak == -float("inf"), 0.0, peak)
    row = group * queries + query
    tl.store(delta_out + row, delta, mask=exists)
    tl.store(peak_out + row, peak, mask=exists)
    if MASK == "bias":
        tl.store(shift_out + row, shift, mask=exists)

    dq_a, dq_b = no_sums(ROWS, P_A, P_B)
    dq_r = dq_a
    if R:
        dq_r = tl.zeros([ROWS, ROPE], tl.float32)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)  # [KEYS]
        seen = place < end
        allowed = seen[None, :]
        bias = place[None, :]
        if CAUSAL:
            allowed = allowed & (place[None, :] <= query[:, None] + causal_offset)
        if MASK != "none":
            bias = load_tile(mask, start, mask_stride_s, mask_stride_t, allowed & exists[:, None], ROWS, KEYS)
            if MASK == "bool":
                allowed = allowed & (bias != 0)
        offsets = place.to(tl.int64) * heads
        k_a, k_b = load_blocks(k, offsets * P, seen, P, P_A, P_B)  # [KEYS, P_A], [KEYS, P_B]
        k_r = load_rope(rope, place.to(tl.int64) * rope_stride_t, seen, k_a, R, ROPE)  # [KEYS, ROPE]
        scores = product(q_a, q_b, q_r, k_a, k_b, k_r, P_B, R)  # [ROWS, KEYS]
        weights = weights_of(scores, scale, bias, peak[:, None], shift[:, None], MASK)
        weights = tl.where(allowed, weights, 0.0)
        v_a, v_b = load_blocks(v, offsets * V, seen, V, V_A, V_B)  # [KEYS, V_A], [KEYS, V_B]
        grown = product(do_a, do_b, do_b, v_a, v_b, v_b, V_B, 0)
        d_scores = (weights * (grown - delta[:, None])).to(k_a.dtype)
        dq_a, dq_b = add_products(dq_a, dq_b, d_scores, k_a, k_b, P_B)
        if R:
            dq_r = tl.dot(d_scores, k_r, dq_r, input_precision="ieee")

    dq += b * dq_stride_b + head * dq_stride_n
    dq_rows = query.to(tl.int64) * dq_stride_s
    store_blocks(dq, dq_rows, dq_a * scale, dq_b * scale, exists, P, P_A, P_B)
    if R:
        store_columns(dq + P, dq_rows, dq_r * scale, exists, 0, R, ROPE)


@triton.jit(do_not_specialize=_ANY_VALUE)
def add_to_keys(
    q,
    k,
    rope,
    v,
    mask,
    do,
    delta_in,
    peak_in,
    shift_in,
    dk,
    d_rope,
    dv,
    scale,
    queries,
    heads,
    keys,
    causal_offset,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    rope_stride_b,
    rope_stride_t,
    rope_stride_n,
    mask_stride_b,
    mask_stride_n,
    mask_stride_s,
    mask_stride_t,
    do_stride_b,
    do_stride_s,
    do_stride_n,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_A: tl.constexpr,
    P_B: tl.constexpr,
    ROPE: tl.constexpr,
    V_A: tl.constexpr,
    V_B: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(keys, KEYS)
    tile = tl.program_id(0) % tiles  # under a causal limit, most queries see the first keys
    group = (tl.program_id(0) // tiles).to(tl.int64)
    b = group // heads
    head = group % heads
    place = tile * KEYS + tl.arange(0, KEYS)  # [KEYS]
    there = place < keys
    first = 0
    if CAUSAL:
        # Rounded down to a whole tile: it takes fewer registers, and the queries before see none of these keys.
        first = tl.maximum(tile * KEYS - causal_offset, 0) // ROWS * ROWS

    of_head = (b * keys * heads + head).to(tl.int64)
    offsets = place.to(tl.int64) * heads
    rope += b * rope_stride_b + head * rope_stride_n
    k_a, k_b = load_blocks(k + of_head * P, offsets * P, there, P, P_A, P_B)  # [KEYS, P_A], [KEYS, P_B]
    k_r = load_rope(rope, place.to(tl.int64) * rope_stride_t, there, k_a, R, ROPE)  # [KEYS, ROPE]
    v_a, v_b = load_blocks(v + of_head * V, offsets * V, there, V, V_A, V_B)  # [KEYS, V_A], [KEYS, V_B]
    q += b * q_stride_b + head * q_stride_n
    do += b * do_stride_b + head * do_stride_n
    if MASK != "none":
        first_key = (tile * KEYS).to(tl.int64)
        mask += b * mask_stride_b + head * mask_stride_n + first_key * mask_stride_t

    dk_a, dk_b = no_sums(KEYS, P_A, P_B)
    dk_r = dk_a
    if R:
        dk_r = tl.zeros([KEYS, ROPE], tl.float32)
    dv_a, dv_b = no_sums(KEYS, V_A, V_B)
    for start in tl.range(first, queries, ROWS, num_stages=STAGES):
        query = start + tl.arange(0, ROWS)  # [ROWS]
        exists = query < queries
        allowed = there[:, None] & exists[None, :]
        bias = query[None, :]
        if CAUSAL:
            allowed = allowed & (place[:, None] <= query[None, :] + causal_offset)
        if MASK != "none":
            bias = load_tile(mask, start, mask_stride_t, mask_stride_s, allowed, KEYS, ROWS)
            if MASK == "bool":
                allowed = allowed & (bias != 0)
        q_rows = query.to(tl.int64) * q_stride_s
        q_a, q_b = load_blocks(q, q_rows, exists, P, P_A, P_B)  # [ROWS, P_A], [ROWS, P_B]
        q_r = load_rope(q + P, q_rows, exists, q_a, R, ROPE)  # [ROWS, ROPE]
        row = group * queries + query
        peak = tl.load(peak_in + row, mask=exists, other=0.0)
        shift = peak
        if MASK == "bias":
            shift = tl.load(shift_in + row, mask=exists, other=0.0)
        scores = product(k_a, k_b, k_r, q_a, q_b, q_r, P_B, R)  # [KEYS, ROWS]
        weights = weights_of(scores, scale, bias, peak[None, :], shift[None, :], MASK)
        weights = tl.where(allowed, weights, 0.0)
        do_a, do_b = load_blocks(do, query.to(tl.int64) * do_stride_s, exists, V, V_A, V_B)  # [ROWS, V_A], [ROWS, V_B]
        dv_a, dv_b = add_products(dv_a, dv_b, weights.to(do_a.dtype), do_a, do_b, V_B)
        delta = tl.load(delta_in + row, mask=exists, other=0.0)
        grown = product(v_a, v_b, v_b, do_a, do_b, do_b, V_B, 0)
        d_scores = (weights * (grown - delta[None, :])).to(q_a.dtype)
        dk_a, dk_b = add_products(dk_a, dk_b, d_scores, q_a, q_b, P_B)
        if R:
            dk_r = tl.dot(d_scores, q_r, dk_r, input_precision="ieee")

    store_blocks(dk + of_head * P, offsets * P, dk_a * scale, dk_b * scale, there, P, P_A, P_B)
    if R:
        store_columns(d_rope + of_head * R, offsets * R, dk_r * scale, there, 0, R, ROPE)
    store_blocks(dv + of_head * V, offsets * V, dv_a, dv_b, there, V, V_A, V_B)
