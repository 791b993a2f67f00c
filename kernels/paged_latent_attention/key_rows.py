"""Decode over pages on Hopper for up to 32 rows, in Gluon: keys are the rows of products, and heads their columns.

The tensor cores take 64 rows at a time. With fewer heads of queries than that, a tile of 64 keys takes their place:

    scores   S^T [64, ROWS] = K [64, 512 + 64] Q^T
    sums     O^T [512, ROWS] += V^T [512, 64] P^T

So nothing is computed of rows that do not exist, and keys are read from shared memory by the tensor cores themselves.

One warp group loads tiles of keys by TMA, two compute. Each takes every second tile, with a softmax and sums of its own
in registers, and waits for the other only at the end of a sequence: then each has half of the columns of the sums of
both (`finish`). Two tiles fit into shared memory. The first half of a tile is replaced while the second is in use.

    q_latent [B, Sq, N, 512], q_rope [B, Sq, N, 64]     any strides but 1 in the last dim
    latents, ropes     descriptors of pages [pages, page_size, 512] and [pages, page_size, 64], boxes [1, 64, 64]
    other arguments    as in `warp_groups`
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
from .taken import ANY_VALUE, RECORD, TILE, box_of, keys_of, load_box, rows_before, taken_by

BOX = gl.constexpr(64)
"""Columns that are loaded at a time: 128 bytes of bfloat16."""
BOXES = gl.constexpr(8)
"""Boxes of the latents of a tile."""
RANK = gl.constexpr(512)
KEYS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""A box, 16 bytes per thread."""
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BUFFERS = gl.constexpr(2)
FULL, FREE = gl.constexpr(2), gl.constexpr(2 + 2 * BUFFERS.value)
"""Indices of the first barriers of a kind: one for each half of each buffer."""
QUERIES, MET = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def load_tiles(keys, ropes, barriers, latents, rope_keys, where):
    """The producer: load tiles of all sequences of a piece, each half as soon as there is room."""
    table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    loaded = 0
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        entries = table + group.to(gl.int64) * table_stride_0
        upcoming = box_of(entries, table_stride_1, begin, end, page_tiles)
        for start in range(begin, end, TILE):
            page, row = upcoming
            upcoming = box_of(entries, table_stride_1, start + TILE, end, page_tiles)
            buffer = loaded % BUFFERS
            free = 1 ^ (loaded // BUFFERS & 1)
            mbarrier.wait(barriers.index(FREE + 2 * buffer), free)
            full = barriers.index(FULL + 2 * buffer)
            mbarrier.expect(full, TILE * (BOXES // 2 + 1) * BOX * 2)
            load_box(rope_keys, page, row, 0, full, ropes.index(buffer))
            for box in gl.static_range(BOXES // 2):
                load_box(latents, page, row, box * BOX, full, keys.index(buffer * BOXES + box))
            mbarrier.wait(barriers.index(FREE + 2 * buffer + 1), free)
            full = barriers.index(FULL + 2 * buffer + 1)
            mbarrier.expect(full, TILE * BOXES // 2 * BOX * 2)
            for box in gl.static_range(BOXES // 2, BOXES):
                load_box(latents, page, row, box * BOX, full, keys.index(buffer * BOXES + box))
            loaded += 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if not LATE:
        gdc_launch_dependents()  # of `combine`: the last keys are on their way


@gluon.jit
def place_queries(
    q_boxes, q_ropes, q_latent, q_rope, group, rows, heads, tile, strides, ROWS: gl.constexpr, WHO: gl.constexpr
):
    """Load half of the queries of a sequence to shared memory, and the rope queries; 0 for rows that do not exist."""
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    column = gl.arange(0, BOX, gl.SliceLayout(0, LOADED))
    exists = (row < rows)[:, None]
    query = (row // heads).to(gl.int64)
    head = (row % heads).to(gl.int64)
    group = group.to(gl.int64)
    base = q_latent + (group * strides[0] + query * strides[1] + head * strides[2])[:, None]
    half = ()
    for box in gl.static_range(BOXES // 2):
        columns = (WHO * (BOXES // 2) + box) * BOX + column
        half += (gl.load(base + columns[None, :], mask=exists, other=0.0),)
    if WHO == 0:
        base = q_rope + (group * strides[3] + query * strides[4] + head * strides[5])[:, None]
        q_ropes.store(gl.load(base + column[None, :], mask=exists, other=0.0))
    for box in gl.static_range(BOXES // 2):
        q_boxes.index(WHO * (BOXES // 2) + box).store(half[box])


@gluon.jit
def meet(barriers, met):
    """Wait until both consumers are here, for the time `met`."""
    mbarrier.arrive(barriers.index(MET))
    mbarrier.wait(barriers.index(MET), met & 1)
    return met + 1


@gluon.jit
def seen_by_all(end, count, queries, heads, tile, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """The last key that all rows of a tile see."""
    last = end - 1
    if CAUSAL:
        last = gl.minimum(last, tile * ROWS // heads + count - queries)
    return last


@gluon.jit
def hide(
    scores, start, end, count, queries, heads, tile, ROWS: gl.constexpr, SCORES: gl.constexpr, CAUSAL: gl.constexpr
):
    """Scores of the tile of keys from `start` on, -inf for keys that a row does not see."""
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    last = row * 0 + end - 1
    if CAUSAL:
        last = gl.minimum(last, row // heads + count - queries)
    place = start - rows_before(start, end) + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    return gl.where((place >= start)[:, None] & (place[:, None] <= last[None, :]), scores, -float("inf"))


@gluon.jit
def finish(accs, m, total, shared, outputs, place, met, STEP: gl.constexpr, ROWS: gl.constexpr, WHO: gl.constexpr):
    """Merge the results of both consumers, and store half of the columns.

    Of the eight `accs` `[64, ROWS]`, part c has the columns `c // STEP * 64 * STEP + c % STEP + STEP * i`.
    """
    stats, exchange, barriers = shared
    o, lse, acc, m_out, total_out = outputs
    group, rows, tile, part, begin, end, count = place
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    total = gl.sum(total, 0)
    saw = total != 0  # NaN too
    mine = gl.where(saw, m + gl.log(total), LOWEST)
    stats.index(WHO).store(mine)
    met = meet(barriers, met)
    other = stats.index(1 - WHO).load(gl.SliceLayout(0, SCORES))
    top = gl.maximum(mine, other)
    weight = gl.where(saw, gl.exp2((mine - top) * LOG2E), 0.0)
    both = weight + gl.where(other != LOWEST, gl.exp2((other - top) * LOG2E), 0.0)
    cut = (begin > 0) | (end < count)
    # Partial sums stay as they are, for `combine`.
    share = gl.where(saw, weight / total, 0.0) / gl.where(cut, 1.0, gl.maximum(both, 1.0))
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    exists = row < rows
    slot = gl.where(cut, (2 * part + (begin == 0).to(gl.int32)) * rows, group * rows)
    there = exists[None, :]
    for box in gl.static_range(4 * WHO, 4 * WHO + 4):
        # Two places in turn, so that none is written to before the other consumer has read it.
        exchange.index(2 * (box % 2) + WHO).store(accs[box ^ 4] * share[None, :])
        met = meet(barriers, met)
        got = exchange.index(2 * (box % 2) + 1 - WHO).load(SCORES)
        sums = accs[box] * share[None, :] + got
        column = box // STEP * 64 * STEP + box % STEP + STEP * gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        places = (slot.to(gl.int64) + row)[None, :] * RANK + column[:, None]
        if cut:
            gl.store(acc + places, sums, mask=there)
        else:
            gl.store(o + places, sums.to(gl.bfloat16), mask=there)
    if WHO == 0:
        if cut:
            gl.store(m_out + slot + row, top, mask=exists)
            gl.store(total_out + slot + row, both, mask=exists)
        else:
            gl.store(lse + slot + row, gl.where(both == 0, -float("inf"), top + gl.log(both)), mask=exists)
    return met


@gluon.jit
def attend_some(shared, inputs, outputs, numbers, ROWS: gl.constexpr, WHO: gl.constexpr):
    """A consumer: attend to every second tile of keys of each sequence of a piece."""
    keys, ropes, q_boxes, q_ropes, weights, stats, exchange, barriers = shared
    q_latent, q_rope, lengths, pieces = inputs
    scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    loaded = 0
    met = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        place_queries(q_boxes, q_ropes, q_latent, q_rope, group, rows, heads, tile, strides, ROWS, WHO)
        fence_async_shared()
        mbarrier.arrive(barriers.index(QUERIES))
        mbarrier.wait(barriers.index(QUERIES), turn & 1)

        seen = seen_by_all(end, count, queries, heads, tile, ROWS, CAUSAL)
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(0, SCORES))
        total = gl.zeros([TILE, ROWS], gl.float32, SCORES)
        accs = ()
        for _ in gl.static_range(BOXES):
            accs += (gl.zeros([BOX, ROWS], gl.float32, SCORES),)
        for start in range(begin + WHO * TILE, end, 2 * TILE):
            number = loaded + (start - begin) // TILE
            buffer = number % BUFFERS
            filled = number // BUFFERS & 1
            first = buffer * BOXES
            # Always 0, which the assembler does not see: it would keep all addresses of queries in registers.
            zero = number >> 30
            mbarrier.wait(barriers.index(FULL + 2 * buffer), filled)
            scores = gl.zeros([TILE, ROWS], gl.float32, SCORES)
            scores = warpgroup_mma(ropes.index(buffer), q_ropes.permute((1, 0)), scores, use_acc=False, is_async=True)
            for box in gl.static_range(BOXES // 2):
                query = q_boxes.index(zero + box).permute((1, 0))
                scores = warpgroup_mma(keys.index(first + box), query, scores, is_async=True)
            mbarrier.wait(barriers.index(FULL + 2 * buffer + 1), filled)
            for box in gl.static_range(BOXES // 2, BOXES):
                query = q_boxes.index(zero + box).permute((1, 0))
                scores = warpgroup_mma(keys.index(first + box), query, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
            if start + TILE - 1 > seen:
                scores = hide(scores, start, end, count, queries, heads, tile, ROWS, SCORES, CAUSAL)
            m_new = gl.maximum(m, gl.max(scores, 0))
            probabilities = gl.exp2((scores - m_new[None, :]) * LOG2E)
            decay = gl.exp2((m - m_new) * LOG2E)
            total = total * decay[None, :] + probabilities
            m = m_new
            weights.index(WHO).store(probabilities.to(gl.bfloat16))
            fence_async_shared()
            sums = ()
            for box in gl.static_range(BOXES):
                values = keys.index(first + box).permute((1, 0))
                acc = accs[box] * decay[None, :]
                sums += (warpgroup_mma(values, weights.index(WHO), acc, is_async=True),)
            halves = warpgroup_mma_wait(4, deps=(sums[0], sums[1], sums[2], sums[3]))
            mbarrier.arrive(barriers.index(FREE + 2 * buffer))
            others = warpgroup_mma_wait(0, deps=(sums[4], sums[5], sums[6], sums[7]))
            mbarrier.arrive(barriers.index(FREE + 2 * buffer + 1))
            accs = halves + others
        loaded += gl.cdiv(gl.maximum(end - begin, 0), TILE)
        where = (group, rows, tile, part, begin, end, count)
        met = finish(accs, m, total, (stats, exchange, barriers), outputs, where, met, 1, ROWS, WHO)
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
    ROWS: gl.constexpr,
):
    tiles = gl.cdiv(queries * heads, ROWS)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS * BOXES, TILE, BOX], KEYS)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, BOX], KEYS)
    q_boxes = gl.allocate_shared_memory(gl.bfloat16, [BOXES, ROWS, BOX], KEYS)
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BOX], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2))
    stats = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    exchange = gl.allocate_shared_memory(gl.float32, [4, BOX, ROWS], PLAIN)
    barriers = gl.allocate_shared_memory(gl.int64, [2 + 4 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 + 4 * BUFFERS):
        mbarrier.init(barriers.index(i), count=1 + (i < 2))
    fence_async_shared()

    shared = (keys, ropes, q_boxes, q_ropes, weights, stats, exchange, barriers)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    numbers = (scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides)
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE)
    gdc_wait()  # for what `share_out` stores
    gl.warp_specialize(
        [
            (load_tiles, (keys, ropes, barriers, latents, rope_keys, where)),
            (attend_some, (shared, inputs, outputs, numbers, ROWS, 0)),
            (attend_some, (shared, inputs, outputs, numbers, ROWS, 1)),
        ],
        [4, 4],
        [240, 240],
    )
