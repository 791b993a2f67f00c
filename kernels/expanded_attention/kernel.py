"""Flash attention of queries to one chunk of up-projected keys, continuing from the state that earlier chunks left.

A program takes a tile of queries of one head of one sequence. Its online softmax is that of `_common.attend`. Between
chunks the state is kept in memory unnormalised, as sums with the maximum of their rows, so that rows whose scores are
all the lowest finite number lose nothing.

    q         [B, Sq, H, P + R]                   any strides but 1 in the last dim, the nope part first
    k, v      [H, B, C, P], [H, B, C, V]          the workspace
    rope      [B, C, H, R]                        from the cache, with a stride of 0 where heads share it
    mask      [B, H, Sq, C], any strides, 0 where it broadcasts
    lengths, starts, counts   [B]                 for sequences of unequal lengths, whose chunk starts at `begin`: the
                                                  number of tokens, the position of the first query, and the number of
                                                  queries that are not padding
    o, lse    [B, Sq, H, V], [B, Sq, H]           the result, written when a tile has seen its last key
    acc       [B, H, Sq, V], m and total [B, H, Sq]   float32, contiguous, with several chunks
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.attend import LOWEST, add_keys, load_tile
from .._common.blocks import load_blocks, load_rope, no_sums, product, store_blocks

_ANY_VALUE = ("scale", "queries", "heads", "keys", "causal_offset", "begin", "first", "last")


@triton.jit(do_not_specialize=_ANY_VALUE)
def attend_chunk(
    q,
    k,
    rope,
    v,
    mask,
    lengths,
    starts,
    counts,
    o,
    lse,
    acc,
    m_state,
    total_state,
    scale,
    queries,
    heads,
    keys,
    causal_offset,
    begin,
    first,
    last,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    k_stride_h,
    k_stride_b,
    v_stride_h,
    v_stride_b,
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
    lse_stride_b,
    lse_stride_s,
    lse_stride_n,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr,
    COUNTS: tl.constexpr,
    STATE: tl.constexpr,
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
    count = queries
    if COUNTS:
        count = tl.load(counts + b).to(tl.int32)
    exists = query < count

    stop = keys
    if LENGTHS:
        stop = tl.load(lengths + b).to(tl.int32) - begin
        if CAUSAL:
            causal_offset = tl.load(starts + b).to(tl.int32) - begin
            stop = tl.minimum(stop, tl.minimum(tile * ROWS + ROWS, count) + causal_offset)
    elif CAUSAL:
        stop = tl.minimum(tile * ROWS + ROWS, queries) + causal_offset
    # A tile whose queries see none of this chunk was finished by an earlier one.
    idle = (first == 0) & (stop <= 0)
    if COUNTS:
        idle = idle | (tile * ROWS >= count)
    if idle:
        return
    end = tl.minimum(stop, keys)

    q_rows = query.to(tl.int64) * q_stride_s
    q += b * q_stride_b + head * q_stride_n
    q_a, q_b = load_blocks(q, q_rows, exists, P, P_A, P_B)  # [ROWS, P_A], [ROWS, P_B]
    q_r = load_rope(q + P, q_rows, exists, q_a, R, ROPE)  # [ROWS, ROPE]
    k += head * k_stride_h + b * k_stride_b
    v += head * v_stride_h + b * v_stride_b
    rope += b * rope_stride_b + head * rope_stride_n
    if MASK != "none":
        first_row = (tile * ROWS).to(tl.int64)
        mask += b * mask_stride_b + head * mask_stride_n + first_row * mask_stride_s

    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_a, acc_b = no_sums(ROWS, V_A, V_B)
    rows = group * queries + query  # of the state
    if STATE:
        begun = exists & (first + query * 0 == 0)
        m = tl.load(m_state + rows, mask=begun, other=LOWEST)
        total = tl.load(total_state + rows, mask=begun, other=0.0)
        acc_a, acc_b = load_blocks(acc, rows * V, begun, V, V_A, V_B)

    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)  # [KEYS]
        seen = place < end
        allowed = seen[None, :]
        if CAUSAL:
            allowed = allowed & (place[None, :] <= query[:, None] + causal_offset)
        if MASK != "none":
            bias = load_tile(mask, start, mask_stride_s, mask_stride_t, allowed & exists[:, None], ROWS, KEYS)
            if MASK == "bool":
                allowed = allowed & (bias != 0)
                # Keys that no query sees may hold anything, and 0 times NaN is NaN.
                seen = tl.max(allowed.to(tl.int32), 0) > 0
        offsets = place.to(tl.int64)
        k_a, k_b = load_blocks(k, offsets * P, seen, P, P_A, P_B)  # [KEYS, P_A], [KEYS, P_B]
        k_r = load_rope(rope, offsets * rope_stride_t, seen, k_a, R, ROPE)  # [KEYS, ROPE]
        scores = product(q_a, q_b, q_r, k_a, k_b, k_r, P_B, R) * scale
        if MASK == "bias":
            scores += bias.to(tl.float32)
        scores = tl.where(allowed, scores, -float("inf"))  # [ROWS, KEYS]
        v_a, v_b = load_blocks(v, offsets * V, seen, V, V_A, V_B)  # [KEYS, V_A], [KEYS, V_B]
        m, total, acc_a, acc_b = add_keys(m, total, acc_a, acc_b, scores, v_a, v_b, V_B)

    finished = last != 0
    if CAUSAL or LENGTHS:
        finished = finished | (stop <= keys)
    if finished:
        # A row's greatest score adds exp(0) = 1 to its total, so only a row that saw no key is below 1.
        share = 1.0 / tl.maximum(total, 1.0)
        tl.store(
            lse + b * lse_stride_b + head * lse_stride_n + query.to(tl.int64) * lse_stride_s,
            m + tl.log(total),
            mask=exists,
        )
        o += b * o_stride_b + head * o_stride_n
        o_rows = query.to(tl.int64) * o_stride_s
        store_blocks(o, o_rows, acc_a * share[:, None], acc_b * share[:, None], exists, V, V_A, V_B)
    else:  # without STATE there is only one chunk, and nothing to continue
        if STATE:
            tl.store(m_state + rows, m, mask=exists)
            tl.store(total_state + rows, total, mask=exists)
            store_blocks(acc, rows * V, acc_a, acc_b, exists, V, V_A, V_B)
