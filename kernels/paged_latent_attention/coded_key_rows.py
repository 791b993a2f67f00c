"""Decode over pages of FP8 or INT8 on Hopper for up to 16 rows, in Gluon: as in `key_rows`, with keys in registers.

The tensor cores of Hopper read the left side of a product from registers too. Keys are the left side here, both as keys
and as values, so that codes are converted where they are multiplied (`coded_tiles`). No converted number is written to
shared memory.

    words      [64 keys, 64] int16, for each of 4 boxes of 128 columns
    q_boxes    [8, 16, 64] float16, times a power of two for each row: columns 0, 1, 4, 5 ... of a box, then 2, 3, 6 ...
    weights    [4, 64, 16] float16 of each consumer: times the keys' scales for a box
    sums       8 x [64, 16] float32: even and odd columns of a box

What is kept below 2^14, and how scales enter, is as in `_common.words`. Arguments are as in `key_rows`, latents as
words [pages, page_size, 256].

    factors    float32 of a tile, [64] for each group of columns; largest, the logarithms [64]
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
from .._common.words import HEADROOM
from .coded_tiles import BOXES, IN_PAIRS, load_tiles, numbers_of
from .key_rows import BOX, KEYS, PLAIN, QUERIES, VECTOR, finish, hide, seen_by_all
from .taken import ANY_VALUE, RECORD, TILE, keys_of, taken_by

BUFFERS = gl.constexpr(4)
ROWS = gl.constexpr(16)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS.value, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(2 * ROWS.value, 16, 2))
FULL, FREE = gl.constexpr(2), gl.constexpr(2 + BUFFERS.value)
"""Indices of the first barriers of a kind: one for each buffer."""


@gluon.jit
def place_queries(q_boxes, q_ropes, q_latent, q_rope, group, rows, heads, tile, strides, WHO: gl.constexpr):
    """Load half of the queries of a sequence to shared memory, and the rope queries; 0 for rows that do not exist.

    Returned is what undoes the power of two of each row, `[ROWS]`.
    """
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IN_PAIRS))
    column = gl.arange(0, BOX, gl.SliceLayout(0, IN_PAIRS))
    exists = (row < rows)[:, None]
    query = (row // heads).to(gl.int64)
    head = (row % heads).to(gl.int64)
    group = group.to(gl.int64)
    base = q_latent + (group * strides[0] + query * strides[1] + head * strides[2])[:, None]
    top = gl.zeros([ROWS, BOX], gl.float32, IN_PAIRS)
    loaded = ()
    for box in gl.static_range(2 * BOXES):
        columns = box // 2 * 2 * BOX + column // 2 * 4 + box % 2 * 2 + column % 2
        part = gl.load(base + columns[None, :], mask=exists, other=0.0).to(gl.float32)
        top = gl.maximum(top, gl.maximum(part, -part))
        loaded += (part,)
    if WHO == 0:
        base = q_rope + (group * strides[3] + query * strides[4] + head * strides[5])[:, None]
        q_ropes.store(gl.load(base + column[None, :], mask=exists, other=0.0))
    # The power that brings the greatest magnitude of a row to [2^14, 2^15), as the exponent of a float32.
    exponent = gl.maximum(gl.cast(gl.max(top, 1), gl.int32, bitcast=True) >> 23, 15)
    power = gl.cast((268 - exponent) << 23, gl.float32, bitcast=True)
    for box in gl.static_range(WHO * BOXES, (WHO + 1) * BOXES):
        q_boxes.index(box).store((loaded[box] * power[:, None]).to(gl.float16))
    return gl.cast((exponent - 14) << 23, gl.float32, bitcast=True)


@gluon.jit
def scores_of(words, first, ropes, q_boxes, q_ropes, zero, scales, of_rows, scale, INT8: gl.constexpr):
    """Scores `[64, ROWS]` of a tile whose first box is `first`.

    `zero` is always 0, which the assembler does not see: it would keep all addresses of queries in registers.
    """
    none = gl.zeros([TILE, ROWS], gl.float32, SCORES)
    of_rope = warpgroup_mma(ropes, q_ropes.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = none
    pending = (none, none, none)
    for box in gl.static_range(BOXES):
        a, b = numbers_of(words.index(first + box).load(OPERAND), True, INT8)
        product = warpgroup_mma(a, q_boxes.index(zero + 2 * box).permute((1, 0)), none, use_acc=False, is_async=True)
        product = warpgroup_mma(b, q_boxes.index(zero + 2 * box + 1).permute((1, 0)), product, is_async=True)
        # Wait for the operands too, because their registers are read until the product is complete.
        if box > 0:
            done = warpgroup_mma_wait(2, deps=pending)
            scores += done[0] * scales[(box - 1) * len(scales) // BOXES][:, None]
        pending = (product, a, b)
    done = warpgroup_mma_wait(0, deps=(of_rope, pending[0], pending[1], pending[2]))
    scores += done[1] * scales[len(scales) - 1][:, None]
    return scores * of_rows[None, :] + done[0] * scale


@gluon.jit
def add_values(accs, words, first, weights, decay, free, INT8: gl.constexpr, WHO: gl.constexpr):
    """Add the weighed values of a tile, and free it."""
    sums = ()
    pending = (decay, decay, decay, decay)
    for box in gl.static_range(BOXES):
        a, b = numbers_of(words.index(first + box).permute((1, 0)).load(OPERAND), False, INT8)
        if box == BOXES - 1:
            mbarrier.arrive(free)
        of_box = weights[WHO * BOXES + box]
        even = warpgroup_mma(a, of_box, accs[2 * box] * decay[None, :], is_async=True)
        odd = warpgroup_mma(b, of_box, accs[2 * box + 1] * decay[None, :], is_async=True)
        if box > 0:
            done = warpgroup_mma_wait(2, deps=pending)
            sums += (done[0], done[1])
        pending = (even, odd, a, b)
    done = warpgroup_mma_wait(0, deps=pending)
    sums += (done[0], done[1])
    return sums


@gluon.jit
def attend_some(shared, inputs, outputs, numbers, GROUPS: gl.constexpr, INT8: gl.constexpr, WHO: gl.constexpr):
    """A consumer: attend to every second tile of keys of each sequence of a piece."""
    words, ropes, factors, largest, q_boxes, q_ropes, weights, stats, exchange, barriers = shared
    q_latent, q_rope, lengths, pieces = inputs
    scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides = numbers
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    loaded = 0
    met = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        undo = place_queries(q_boxes, q_ropes, q_latent, q_rope, group, rows, heads, tile, strides, WHO)
        of_rows = gl.convert_layout(undo, gl.SliceLayout(0, SCORES)) * scale
        fence_async_shared()
        mbarrier.arrive(barriers.index(QUERIES))
        mbarrier.wait(barriers.index(QUERIES), turn & 1)

        seen = seen_by_all(end, count, queries, heads, tile, ROWS, CAUSAL)
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(0, SCORES))
        total = gl.zeros([TILE, ROWS], gl.float32, SCORES)
        accs = ()
        for _ in gl.static_range(2 * BOXES):
            accs += (gl.zeros([BOX, ROWS], gl.float32, SCORES),)
        for start in range(begin + WHO * TILE, end, 2 * TILE):
            number = loaded + (start - begin) // TILE
            buffer = number % BUFFERS
            box_0 = buffer * BOXES
            mbarrier.wait(barriers.index(FULL + buffer), number // BUFFERS & 1)
            scale_of = ()
            for of in gl.static_range(GROUPS):
                of_group = factors.index(buffer).slice(of * TILE, TILE)
                scale_of += (of_group.load(gl.SliceLayout(1, SCORES)),)
            scores = scores_of(
                words, box_0, ropes.index(buffer), q_boxes, q_ropes, number >> 30, scale_of, of_rows, scale, INT8
            )
            if start + TILE - 1 > seen:
                scores = hide(scores, start, end, count, queries, heads, tile, ROWS, SCORES, CAUSAL)
            weighed = scores + largest.index(buffer).load(gl.SliceLayout(1, SCORES))[:, None]
            m_new = gl.maximum(m, gl.max(weighed, 0) - HEADROOM)
            probabilities = gl.exp2((scores - m_new[None, :]) * LOG2E)
            decay = gl.exp2((m - m_new) * LOG2E)
            total = total * decay[None, :] + probabilities
            m = m_new
            for box in gl.static_range(BOXES):
                of_box = probabilities * scale_of[box * GROUPS // BOXES][:, None]
                weights[WHO * BOXES + box].store(of_box.to(gl.float16))
            fence_async_shared()
            free = barriers.index(FREE + buffer)
            accs = add_values(accs, words, box_0, weights, decay, free, INT8, WHO)
        loaded += gl.cdiv(gl.maximum(end - begin, 0), TILE)
        where = (group, rows, tile, part, begin, end, count)
        met = finish(accs, m, total, (stats, exchange, barriers), outputs, where, met, 2, ROWS, WHO)
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if LATE:
        gdc_launch_dependents()


@gluon.jit(do_not_specialize=ANY_VALUE)
def attend_pages(
    q_latent,
    q_rope,
    words_of_pages,
    rope_keys,
    scales,
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
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    table_stride_0,
    table_stride_1,
    CAUSAL: gl.constexpr,
    LATE: gl.constexpr,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
):
    tiles = gl.cdiv(queries * heads, ROWS)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    words = gl.allocate_shared_memory(gl.int16, [BUFFERS * BOXES, TILE, BOX], KEYS)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, BOX], KEYS)
    q_boxes = gl.allocate_shared_memory(gl.float16, [2 * BOXES, ROWS, BOX], KEYS)
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BOX], KEYS)
    factors = gl.allocate_shared_memory(gl.float32, [BUFFERS, GROUPS * TILE], VECTOR)
    largest = gl.allocate_shared_memory(gl.float32, [BUFFERS, TILE], VECTOR)
    weights = ()
    for _ in gl.static_range(2 * BOXES):  # of one allocation, the compiler would keep each from the next by a barrier
        weights += (gl.allocate_shared_memory(gl.float16, [TILE, ROWS], WEIGHTS),)
    stats = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    exchange = gl.allocate_shared_memory(gl.float32, [4, BOX, ROWS], PLAIN)
    barriers = gl.allocate_shared_memory(gl.int64, [2 + 2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 + 2 * BUFFERS):
        mbarrier.init(barriers.index(i), count=1 + (i < FREE))
    fence_async_shared()

    shared = (words, ropes, factors, largest, q_boxes, q_ropes, weights, stats, exchange, barriers)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    numbers = (scale, queries, heads, tokens, part, tile, own, CAUSAL, LATE, strides)
    pages = (words_of_pages, rope_keys, scales, (scale_stride_0, scale_stride_1, scale_stride_2))
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE)
    gdc_wait()  # for what `share_out` stores
    gl.warp_specialize(
        [
            (
                load_tiles,
                (words, ropes, (factors, largest), barriers, pages, where, GROUPS, BUFFERS, FULL, FREE, False),
            ),
            (attend_some, (shared, inputs, outputs, numbers, GROUPS, INT8, 0)),
            (attend_some, (shared, inputs, outputs, numbers, GROUPS, INT8, 1)),
        ],
        [4, 4],
        [232, 232],  # more for the loader, which has scales in registers
    )
