"""Decode over pages on Blackwell (sm_100) with sums in tensor memory, in Gluon: one warp loads, one multiplies, four
compute the softmax.

A program takes 128 rows (heads of queries) of a sequence and half of the output's columns. Its 128 x 256 sums take half
of tensor memory, beside the scores and the weights of a page. Two programs compute the same scores, in order to use all
rows of a product: with 64 rows and all columns, the matrix unit would run at half its rate.

    loader      page j                                       other half, page j + 1          own half
    products    S = Q K^T                          O += P V                        S = Q K^T
    softmax                   P, O to the new m                                              P, O to the new m

Shared memory, of 227 KiB: 144 for queries, 72 for a page. A page is loaded in two parts with a barrier each: the half
of the columns that are this program's values (`own`), and the other half with the rope keys (`rest`), which is free for
the next page once the scores are computed. Inputs and outputs are those of `warp_groups`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._common.attend import LOG2E, LOWEST
from .taken import ANY_VALUE, RECORD, TILE, box_of, keys_of, load_box, rows_before, taken_by
from .warp_groups import HALF, ROPE, as_keys, as_loaded, load_queries

ROWS = gl.constexpr(128)
KEYS = gl.constexpr(as_keys(1))
LOADED = gl.constexpr(as_loaded(1))
IN_ROWS = gl.constexpr(gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1]))
"""One row per thread, 64 columns at a time: the layout in which tensor memory is read."""
SCORES = gl.constexpr(TensorMemoryLayout([128, 64], col_stride=1))
SUMS = gl.constexpr(TensorMemoryLayout([128, 256], col_stride=1))
OWN, REST, FREE_OWN, FREE_REST, SCORED, WEIGHED, SUMMED, QUERIES = (gl.constexpr(i) for i in range(8))
"""Indices of barriers."""


@gluon.jit
def load_pages(own_half, rest_half, ropes, barriers, latents, rope_keys, where):
    """The loader: load pages of all sequences of a piece, each part as soon as there is room."""
    table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, half, LATE = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    free = 1
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        entries = table + group.to(gl.int64) * table_stride_0
        for start in range(begin, gl.maximum(end, begin + 1), TILE):
            page, row = box_of(entries, table_stride_1, start, end, page_tiles)
            mbarrier.wait(barriers.index(FREE_REST), free)
            mbarrier.expect(barriers.index(REST), TILE * (HALF + ROPE) * 2)
            load_box(latents, page, row, (1 - half) * HALF, barriers.index(REST), rest_half)
            load_box(rope_keys, page, row, 0, barriers.index(REST), ropes)
            mbarrier.wait(barriers.index(FREE_OWN), free)
            mbarrier.expect(barriers.index(OWN), TILE * HALF * 2)
            load_box(latents, page, row, half * HALF, barriers.index(OWN), own_half)
            free ^= 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if not LATE:
        gdc_launch_dependents()  # of `combine`: the last keys are on their way


@gluon.jit
def multiply(shared, tensors, barriers, where):
    """The warp that issues products: for each page the scores, then the sums."""
    own_half, rest_half, ropes, q_own, q_rest, q_ropes = shared
    scores, weights, sums = tensors
    _, lengths, pieces, tokens, own, _, _, _, _, _ = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    filled = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        mbarrier.wait(barriers.index(QUERIES), turn & 1)
        for start in range(begin, gl.maximum(end, begin + 1), TILE):
            mbarrier.wait(barriers.index(REST), filled)
            tcgen05_mma(q_rest, rest_half.permute((1, 0)), scores, use_acc=False)
            tcgen05_mma(q_ropes, ropes.permute((1, 0)), scores)
            mbarrier.wait(barriers.index(OWN), filled)
            tcgen05_mma(
                q_own,
                own_half.permute((1, 0)),
                scores,
                mbarriers=[barriers.index(SCORED), barriers.index(FREE_REST)],
            )
            mbarrier.wait(barriers.index(WEIGHED), filled)
            tcgen05_mma(
                weights,
                own_half,
                sums,
                use_acc=start > begin,
                mbarriers=[barriers.index(SUMMED), barriers.index(FREE_OWN)],
            )
            filled ^= 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1


@gluon.jit
def weigh(shared, tensors, barriers, inputs, outputs, numbers, CAUSAL: gl.constexpr, LATE: gl.constexpr):
    """Four warps: load queries, compute the softmax of each page, rescale the sums, and store results."""
    q_own, q_rest, q_ropes = shared
    scores_there, weights_there, sums_there = tensors
    q_latent, q_rope, lengths, pieces = inputs
    o, lse, acc, m_out, total_out = outputs
    scale, queries, heads, tokens, part, tile, half, own, strides = numbers
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    filled = 0
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        exists = row < rows
        query = row // heads
        head = row % heads
        q_rows = group.to(gl.int64) * strides[0] + query.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]
        load_queries(q_own, q_latent, q_rows, exists, half * HALF, HALF, 1)
        load_queries(q_rest, q_latent, q_rows, exists, (1 - half) * HALF, HALF, 1)
        q_rows = group.to(gl.int64) * strides[3] + query.to(gl.int64) * strides[4] + head.to(gl.int64) * strides[5]
        load_queries(q_ropes, q_rope, q_rows, exists, 0, ROPE, 1)
        fence_async_shared()
        mbarrier.arrive(barriers.index(QUERIES))

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IN_ROWS))
        exists = row < rows
        limit = row * 0 + end - 1  # the last key that a row sees
        if CAUSAL:
            limit = gl.minimum(limit, row // heads + count - queries)
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, IN_ROWS))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, IN_ROWS))
        for start in range(begin, gl.maximum(end, begin + 1), TILE):
            mbarrier.wait(barriers.index(SCORED), filled)
            scores = scores_there.load(IN_ROWS) * scale
            place = gl.arange(0, TILE, gl.SliceLayout(0, IN_ROWS)) - rows_before(start, end)
            seen = (place >= 0)[None, :] & (place[None, :] <= (limit - start)[:, None])
            scores = gl.where(seen, scores, -float("inf"))
            m_new = gl.maximum(m, gl.max(scores, 1))
            weights = gl.exp2((scores - m_new[:, None]) * LOG2E)
            decay = gl.exp2((m - m_new) * LOG2E)
            total = total * decay + gl.sum(weights, 1)
            m = m_new
            # The sums of the previous page are complete, because this page was loaded in place of its values.
            weights_there.store(weights.to(gl.bfloat16))
            if start > begin:
                for column in gl.static_range(0, HALF, 64):
                    columns = sums_there.slice(column, 64)
                    columns.store(columns.load(IN_ROWS) * decay[:, None])
            mbarrier.arrive(barriers.index(WEIGHED))
            filled ^= 1
        mbarrier.wait(barriers.index(SUMMED), filled ^ 1)

        # The results of a sequence that is cut go to the slots of the part, for `combine`.
        cut = (begin > 0) | (end < count)
        slot = (2 * part + (begin == 0).to(gl.int32)) * rows
        first = gl.where(cut, slot, group * rows)
        # A row's greatest score adds 1 to its total, so only a row that saw no key is below 1.
        share = 1.0 / gl.maximum(total, 1.0)
        for column in gl.static_range(0, HALF, 64):
            sums = sums_there.slice(column, 64).load(IN_ROWS)
            columns = half * HALF + column + gl.arange(0, 64, gl.SliceLayout(0, IN_ROWS))
            place = first.to(gl.int64) * (2 * HALF) + row[:, None] * (2 * HALF) + columns[None, :]
            if cut:
                gl.store(acc + place, sums, mask=exists[:, None])
            else:
                gl.store(o + place, (sums * share[:, None]).to(gl.bfloat16), mask=exists[:, None])
        if half == 0:
            if cut:
                gl.store(m_out + first + row, m, mask=exists)
                gl.store(total_out + first + row, total, mask=exists)
            else:
                gl.store(lse + first + row, m + gl.log(total), mask=exists)
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if LATE:
        gdc_launch_dependents()


@gluon.jit(do_not_specialize=ANY_VALUE)
def attend_pages(
    q_latent,
    q_rope,
    latents,
    rope_keys,
    table,
    lengths,
    pieces,
    o,
    lse,
    acc,
    m_out,
    total_out,
    scale,
    queries,
    heads,
    tokens,
    own,
    page_tiles,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    qr_stride_b,
    qr_stride_s,
    qr_stride_n,
    table_stride_0,
    table_stride_1,
    CAUSAL: gl.constexpr,
    LATE: gl.constexpr,
):
    tiles = gl.cdiv(queries * heads, ROWS)
    half = gl.program_id(0) % 2
    tile = gl.program_id(0) // 2 % tiles
    part = gl.program_id(0) // 2 // tiles
    pieces += part * RECORD

    own_half = gl.allocate_shared_memory(gl.bfloat16, [TILE, HALF], KEYS)
    rest_half = gl.allocate_shared_memory(gl.bfloat16, [TILE, HALF], KEYS)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [TILE, ROPE], KEYS)
    q_own = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HALF], KEYS)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HALF], KEYS)
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], KEYS)
    scores = allocate_tensor_memory(gl.float32, [ROWS, TILE], SCORES)
    weights = allocate_tensor_memory(gl.bfloat16, [ROWS, TILE], SCORES)
    sums = allocate_tensor_memory(gl.float32, [ROWS, HALF], SUMS)
    barriers = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()

    shared = (own_half, rest_half, ropes, q_own, q_rest, q_ropes)
    tensors = (scores, weights, sums)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    numbers = (scale, queries, heads, tokens, part, tile, half, own, strides)
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, half, LATE)
    gdc_wait()  # for what `share_out` stores
    gl.warp_specialize(
        [
            (weigh, ((q_own, q_rest, q_ropes), tensors, barriers, inputs, outputs, numbers, CAUSAL, LATE)),
            (multiply, (shared, tensors, barriers, where)),
            (load_pages, (own_half, rest_half, ropes, barriers, latents, rope_keys, where)),
        ],
        [1, 1],
        [192, 192],
    )
