"""Decode over pages on Hopper by three warp groups, in Gluon: one loads, two compute half of the output each.

A program takes 64 rows (heads of queries) of a sequence, and keys in pairs of tiles of 64, here called pages. The
first consumer computes the scores of the first page of a pair and the columns A of the output, the second consumer the
scores of the second page and the columns B. So each score is computed once, and the softmax of one overlaps products of
the other:

    first    S0 = Q K0^T      m0, P0        A += P0 V0a           P0 in the scale of m1 ->      A += P1 V1a
    second   S1 = Q K1^T      m0 -> m1, P1 ->          B += P1 V1b                      B += P0 V0b

`->` marks what goes to the other consumer through shared memory: the greatest scores so far, and the weights, which
replace the rope keys of their page, as those are no longer needed once the page's scores are computed.

    q_latent [B, Sq, N, 512], q_rope [B, Sq, N, 64]     any strides but 1 in the last dim
    latents, ropes     descriptors of pages [pages, page_size, 512] and [pages, page_size, 64], boxes [1, 64, 256] and
                       [1, 64, 64]
    page_tiles         tiles of 64 keys in a page
    pieces             [parts, 8] int32: what each program takes, written by `share_out`
    o, lse, acc, m_out, total_out     as in `_common.kernel`, for the same `combine`

Shared memory, of 227 KiB: 72 for queries, 144 for two pages. A page is loaded in two pieces with a barrier each: the
half that only its own consumer reads (`own`), and the other half with the rope key (`rest`), which the other consumer
reads last. So half of a pair can be replaced by the next while the other half is in use.

With two BLOCKS a program is a cluster of two thread blocks (`clusters`), each with 64 of its 128 rows and the same
pages. All of the above is true of each block; pages are loaded for both when there is room in both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._common.attend import LOG2E, LOWEST
from .clusters import a_barrier_each, a_barrier_for_all, alike, apart, load_box_for_all
from .taken import ANY_VALUE, RECORD, TILE, box_of, keys_of, rows_before, taken_by

HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
OWN, REST, WEIGHED, GREATEST, QUERIES, MET = (gl.constexpr(2 * i) for i in range(6))
"""Indices of barriers: two of each kind, one per page or consumer, but only one of QUERIES and of MET."""
FREE_OWN, FREE_REST = (gl.constexpr(2 * i) for i in range(2))
"""Indices of the barriers that blocks share, two of each kind, one per page."""


@gluon.constexpr_function
def in_scores(blocks):
    """The layout of scores."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], apart(blocks, 2))


@gluon.constexpr_function
def in_sums(blocks):
    """The layout of sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16], apart(blocks, 2))


@gluon.constexpr_function
def as_loaded(blocks):
    """The layout in which queries are loaded: 64 columns at a time, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], apart(blocks, 2))


@gluon.constexpr_function
def in_rows(blocks):
    """How rows lie in shared memory, of which each block has its own."""
    return gl.NVMMASharedLayout(128, 16, 2, cga_layout=apart(blocks, 2))


@gluon.constexpr_function
def as_keys(blocks):
    """How keys lie in shared memory, of which each block has all."""
    return gl.NVMMASharedLayout(128, 16, 2, cga_layout=alike(blocks, 2))


@gluon.constexpr_function
def one_a_row(blocks):
    """How a number for each row lies in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=apart(blocks, 1))


@gluon.jit
def load_pages(keys, ropes, barriers, latents, rope_keys, where, BLOCKS: gl.constexpr):
    """The producer: load pages of all sequences of a piece, each part of a page as soon as there is room."""
    table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    free = 1
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        entries = table + group.to(gl.int64) * table_stride_0
        for first in range(begin, gl.maximum(end, begin + 1), 2 * TILE):
            box_0 = box_of(entries, table_stride_1, first, end, page_tiles)
            box_1 = box_of(entries, table_stride_1, first + TILE, end, page_tiles)
            load_own(keys, barriers, latents, box_0, free, 0, BLOCKS)
            load_own(keys, barriers, latents, box_1, free, 1, BLOCKS)
            load_rest(keys, ropes, barriers, latents, rope_keys, box_0, free, 0, BLOCKS)
            load_rest(keys, ropes, barriers, latents, rope_keys, box_1, free, 1, BLOCKS)
            free ^= 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if not LATE:
        gdc_launch_dependents()  # of `combine`: the last keys are on their way


@gluon.jit
def load_own(keys, barriers, latents, box, free, PAGE: gl.constexpr, BLOCKS: gl.constexpr):
    """Load the half of a page that only its own consumer reads."""
    of_block, room = barriers
    full = of_block.index(OWN + PAGE)
    expect(full, room.index(FREE_OWN + PAGE), free, TILE * HALF * 2, BLOCKS)
    load_box_for_all(latents, box[0], box[1], PAGE * HALF, full, keys.index(3 * PAGE), BLOCKS)


@gluon.jit
def load_rest(keys, ropes, barriers, latents, rope_keys, box, free, PAGE: gl.constexpr, BLOCKS: gl.constexpr):
    """Load the other half of a page, and the rope keys."""
    of_block, room = barriers
    full = of_block.index(REST + PAGE)
    expect(full, room.index(FREE_REST + PAGE), free, TILE * (HALF + ROPE) * 2, BLOCKS)
    load_box_for_all(latents, box[0], box[1], (1 - PAGE) * HALF, full, keys.index(PAGE + 1), BLOCKS)
    load_box_for_all(rope_keys, box[0], box[1], 0, full, ropes.index(PAGE), BLOCKS)


@gluon.jit
def expect(full, room, free, BYTES: gl.constexpr, BLOCKS: gl.constexpr):
    """Wait until there is room in all blocks, and have a barrier expect what will be loaded."""
    mbarrier.wait(room, free)
    if BLOCKS == 2:
        # Only the first block has waited. The other one must not expect more before it has got what it expected last.
        mbarrier.wait(full, free)
    mbarrier.expect(full, BYTES)


@gluon.jit
def load_queries(place, base, rows, exists, first, WIDTH: gl.constexpr, BLOCKS: gl.constexpr):
    """Load WIDTH columns from `first` on of the rows at offsets `rows` to shared memory; 0 where not `exists`."""
    for column in gl.static_range(0, WIDTH, 64):
        columns = first + column + gl.arange(0, 64, gl.SliceLayout(0, as_loaded(BLOCKS)))
        values = gl.load(base + (rows[:, None] + columns[None, :]), mask=exists[:, None], other=0.0)
        place.slice(column, 64, dim=1).store(values)


@gluon.jit
def scores_of(q, keys, ropes, barriers, pairs, scale, limit, seen, start, end, WHO: gl.constexpr, BLOCKS: gl.constexpr):
    """Scores of a consumer's page, `[rows, 64]`, -inf for keys that a row does not see."""
    q_halves, q_ropes = q
    SCORES: gl.constexpr = in_scores(BLOCKS)
    filled = pairs & 1
    mbarrier.wait(barriers.index(OWN + WHO), filled)
    # Always 0, which the assembler does not see: it would keep all addresses of queries in registers, and run out.
    zero = pairs >> 30
    scores = gl.zeros([TILE * BLOCKS, TILE], gl.float32, SCORES)
    own = keys.index(zero + 3 * WHO).permute((1, 0))
    scores = warpgroup_mma(q_halves.index(zero + WHO), own, scores, use_acc=False, is_async=True)
    mbarrier.wait(barriers.index(REST + WHO), filled)
    rest = keys.index(zero + WHO + 1).permute((1, 0))
    scores = warpgroup_mma(q_halves.index(zero + 1 - WHO), rest, scores, is_async=True)
    scores = warpgroup_mma(q_ropes, ropes.index(zero + WHO).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
    if start + TILE - 1 > seen:
        place = gl.arange(0, TILE, gl.SliceLayout(0, SCORES)) - rows_before(start, end)
        sees = (place >= 0)[None, :] & (place[None, :] <= (limit - start)[:, None])
        scores = gl.where(sees, scores, -float("inf"))
    return scores


@gluon.jit
def to_sums(values, BLOCKS: gl.constexpr):
    """Convert values per row from the layout of the scores to that of the sums."""
    return gl.convert_layout(values, gl.SliceLayout(1, in_sums(BLOCKS)))


@gluon.jit
def weights_in(ropes, page: gl.constexpr, BLOCKS: gl.constexpr):
    """The memory of a page's rope keys, as that of weights."""
    place = ropes.index(page)
    if BLOCKS == 2:
        place = place.reinterpret(shape=[TILE * BLOCKS, ROPE], layout=in_rows(BLOCKS))
    return place


@gluon.jit
def send_weights(ropes, barriers, weights, WHO: gl.constexpr, BLOCKS: gl.constexpr):
    """Send the weights of a consumer's page to the other consumer."""
    weights_in(ropes, WHO, BLOCKS).store(weights.to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(barriers.index(WEIGHED + WHO))


@gluon.jit
def attend_half(shared, inputs, outputs, numbers, WHO: gl.constexpr, BLOCKS: gl.constexpr):
    """A consumer: for each sequence of a piece, compute the scores of every second page and half of the output."""
    SCORES: gl.constexpr = in_scores(BLOCKS)
    SUMS: gl.constexpr = in_sums(BLOCKS)
    LOADED: gl.constexpr = as_loaded(BLOCKS)
    ROWS: gl.constexpr = TILE * BLOCKS
    keys, ropes, q, greatest, totals, both = shared
    barriers, room = both
    q_halves, q_ropes = q
    q_latent, q_rope, lengths, pieces = inputs
    o, lse, acc, m_out, total_out = outputs
    scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides = numbers
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    pairs = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        exists = row < rows
        query = row // heads
        head = row % heads
        q_rows = group.to(gl.int64) * strides[0] + query.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]
        load_queries(q_halves.index(WHO), q_latent, q_rows, exists, WHO * HALF, HALF, BLOCKS)
        if WHO == 0:
            q_rows = group.to(gl.int64) * strides[3] + query.to(gl.int64) * strides[4] + head.to(gl.int64) * strides[5]
            load_queries(q_ropes, q_rope, q_rows, exists, 0, ROPE, BLOCKS)
        fence_async_shared()
        mbarrier.arrive(barriers.index(QUERIES))
        mbarrier.wait(barriers.index(QUERIES), turn & 1)

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        limit = row * 0 + end - 1  # the last key that a row sees
        seen = end - 1  # the last key that all rows see
        if CAUSAL:
            limit = gl.minimum(limit, row // heads + count - queries)
            seen = gl.minimum(seen, tile * ROWS // heads + count - queries)
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
        for pair in range(begin, gl.maximum(end, begin + 1), 2 * TILE):
            start = pair + WHO * TILE
            filled = pairs & 1
            scores = scores_of(q, keys, ropes, barriers, pairs, scale, limit, seen, start, end, WHO, BLOCKS)
            if WHO == 0:
                m_new = gl.maximum(m, gl.max(scores, 1))
                greatest.index(0).store(m_new)
                mbarrier.arrive(barriers.index(GREATEST))
            else:
                largest = gl.max(scores, 1)
                mbarrier.wait(barriers.index(GREATEST), filled)
                m_new = gl.maximum(greatest.index(0).load(gl.SliceLayout(1, SCORES)), largest)
                greatest.index(1).store(m_new)
                mbarrier.arrive(barriers.index(GREATEST + 1))
            weights = gl.exp2((scores - m_new[:, None]) * LOG2E)
            decay = gl.exp2((m - m_new) * LOG2E)
            total = total * decay + gl.sum(weights, 1)
            if WHO == 1:
                send_weights(ropes, barriers, weights, 1, BLOCKS)
            sums = sums * to_sums(decay, BLOCKS)[:, None]
            operand = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
            sums = warpgroup_mma(operand, keys.index(3 * WHO), sums, is_async=True)
            m = m_new
            if WHO == 0:
                mbarrier.wait(barriers.index(GREATEST + 1), filled)
                m = greatest.index(1).load(gl.SliceLayout(1, SCORES))
                decay = gl.exp2((m_new - m) * LOG2E)
                total = total * decay
                send_weights(ropes, barriers, weights * decay[:, None], 0, BLOCKS)
            # Wait for the weights too, because their registers are read until the product is complete.
            sums, operand = warpgroup_mma_wait(0, deps=(sums, operand))
            mbarrier.arrive(room.index(FREE_OWN + WHO))
            if WHO == 0:
                sums = sums * to_sums(decay, BLOCKS)[:, None]
            mbarrier.wait(barriers.index(WEIGHED + 1 - WHO), filled)
            sums = warpgroup_mma(weights_in(ropes, 1 - WHO, BLOCKS), keys.index(2 - WHO), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(room.index(FREE_REST + 1 - WHO))
            pairs += 1

        totals.index(WHO).store(total)
        mbarrier.arrive(barriers.index(MET))
        mbarrier.wait(barriers.index(MET), turn & 1)
        total += totals.index(1 - WHO).load(gl.SliceLayout(1, SCORES))

        # The results of a sequence that is cut go to the slots of the part, for `combine`.
        cut = (begin > 0) | (end < count)
        exists = row < rows
        columns = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
        sums_row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        place = sums_row[:, None] * (2 * HALF) + columns[None, :]
        there = (sums_row < rows)[:, None]
        if cut:
            first = (2 * part + (begin == 0).to(gl.int32)) * rows
            gl.store(acc + first.to(gl.int64) * (2 * HALF) + place, sums, mask=there)
            if WHO == 0:
                gl.store(m_out + first + row, m, mask=exists)
                gl.store(total_out + first + row, total, mask=exists)
        else:
            first = group * rows
            # A row's greatest score adds 1 to its total, so only a row that saw no key is below 1.
            share = to_sums(1.0 / gl.maximum(total, 1.0), BLOCKS)
            result = (sums * share[:, None]).to(gl.bfloat16)
            gl.store(o + first.to(gl.int64) * (2 * HALF) + place, result, mask=there)
            if WHO == 0:
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
    BLOCKS: gl.constexpr,
):
    ROWS: gl.constexpr = TILE * BLOCKS
    tiles = gl.cdiv(queries * heads, ROWS)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    keys = gl.allocate_shared_memory(gl.bfloat16, [4, TILE, HALF], as_keys(BLOCKS))
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, ROPE], as_keys(BLOCKS))
    q_halves = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, HALF], in_rows(BLOCKS))
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], in_rows(BLOCKS))
    greatest = gl.allocate_shared_memory(gl.float32, [2, ROWS], one_a_row(BLOCKS))
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], one_a_row(BLOCKS))
    barriers = gl.allocate_shared_memory(gl.int64, [12, BLOCKS], a_barrier_each(BLOCKS))
    for i in gl.static_range(12):
        mbarrier.init(barriers.index(i), count=1 + (i == QUERIES) + (i == MET))
    room = gl.allocate_shared_memory(gl.int64, [4, 1], a_barrier_for_all(BLOCKS))
    for i in gl.static_range(4):
        mbarrier.init(room.index(i), count=1)
    fence_async_shared()

    both = (barriers, room)
    shared = (keys, ropes, (q_halves, q_ropes), greatest, totals, both)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    numbers = (scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides)
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE)
    gdc_wait()  # for what `share_out` stores
    gl.warp_specialize(
        [
            (load_pages, (keys, ropes, both, latents, rope_keys, where, BLOCKS)),
            (attend_half, (shared, inputs, outputs, numbers, 0, BLOCKS)),
            (attend_half, (shared, inputs, outputs, numbers, 1, BLOCKS)),
        ],
        [4, 4],
        [240, 240],
    )
