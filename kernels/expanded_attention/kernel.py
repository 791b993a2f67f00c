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

from .._common.attend import LOWEST, add_keys, load_rows
from .._common.store import store_columns

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
    q_a = load_rows(q, q_rows, exists, 0, P, P_A)  # [ROWS, P_A]
    q_b = q_a
    if P_B:
        q_b = load_rows(q, q_rows, exists, P_A, P, P_B)  # [ROWS, P_B]
    q_r = q_a
    if R:
        q_r = load_rows(q + P, q_rows, exists, 0, R, ROPE)  # [ROWS, ROPE]
    k += head * k_stride_h + b * k_stride_b
    v += head * v_stride_h + b * v_stride_b
    rope += b * rope_stride_b + head * rope_stride_n
    if MASK != "none":
        first_row = (tile * ROWS).to(tl.int64)
        mask += b * mask_stride_b + head * mask_stride_n + first_row * mask_stride_s

    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_a = tl.zeros([ROWS, V_A], tl.float32)
    acc_b = acc_a
    if V_B:
        acc_b = tl.zeros([ROWS, V_B], tl.float32)
    rows = group * queries + query  # of the state
    if STATE:
        begun = exists & (first + query * 0 == 0)
        m = tl.load(m_state + rows, mask=begun, other=LOWEST)
        total = tl.load(total_state + rows, mask=begun, other=0.0)
        acc_a = load_rows(acc, rows * V, begun, 0, V, V_A)
        if V_B:
            acc_b = load_rows(acc, rows * V, begun, V_A, V, V_B)

    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)  # [KEYS]
        seen = place < end
        allowed = seen[None, :]
        if CAUSAL:
            allowed = allowed & (place[None, :] <= query[:, None] + causal_offset)
        if MASK != "none":
            # A scalar address plus small offsets that are the same for each tile: a tile of addresses would take all
            # registers.
            corner = mask + (start + tl.full([], 0, tl.int64)) * mask_stride_t
            entries = (tl.arange(0, ROWS) * mask_stride_s)[:, None] + (tl.arange(0, KEYS) * mask_stride_t)[None, :]
            bias = tl.load(corner + entries, mask=allowed & exists[:, None], other=0)
            if MASK == "bool":
                allowed = allowed & (bias != 0)
                # Keys that no query sees may hold anything, and 0 times NaN is NaN.
                seen = tl.max(allowed.to(tl.int32), 0) > 0
        offsets = place.to(tl.int64)
        k_a = load_rows(k, offsets * P, seen, 0, P, P_A)  # [KEYS, P_A]
        scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
        if P_B:
            k_b = load_rows(k, offsets * P, seen, P_A, P, P_B)  # [KEYS, P_B]
            scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
        if R:
            k_rope = load_rows(rope, offsets * rope_stride_t, seen, 0, R, ROPE)  # [KEYS, ROPE]
            scores = tl.dot(q_r, tl.trans(k_rope), scores, input_precision="ieee")
        scores *= scale
        if MASK == "bias":
            scores += bias.to(tl.float32)
        scores = tl.where(allowed, scores, -float("inf"))  # [ROWS, KEYS]
        v_a = load_rows(v, offsets * V, seen, 0, V, V_A)  # [KEYS, V_A]
        v_b = v_a
        if V_B:
            v_b = load_rows(v, offsets * V, seen, V_A, V, V_B)  # [KEYS, V_B]
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
        store_columns(o, query.to(tl.int64) * o_stride_s, acc_a * share[:, None], exists, 0, V, V_A)
        if V_B:
            store_columns(o, query.to(tl.int64) * o_stride_s, acc_b * share[:, None], exists, V_A, V, V_B)
    else:  # without STATE there is only one chunk, and nothing to continue
        if STATE:
            tl.store(m_state + rows, m, mask=exists)
            tl.store(total_state + rows, total, mask=exists)
            store_columns(acc, rows * V, acc_a, exists, 0, V, V_A)
            if V_B:
                store_columns(acc, rows * V, acc_b, exists, V_A, V, V_B)
