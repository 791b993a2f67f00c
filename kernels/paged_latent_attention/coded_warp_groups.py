"""Decode over pages of FP8 or INT8 on Hopper for up to 64 rows, in Gluon: one warp group loads, one weighs, two add up.

As in `coded_key_rows` keys are the left side of products, and are converted in registers. There each of two consumers
has all sums of a tile, for which registers do not suffice from 32 rows on. Here a warp group computes the scores and
weights of all tiles, and passes them to two others through shared memory; each of these adds up half of the columns:

    weigh      S^T = K Q^T,  m,  P^T -> [64 keys, ROWS] float16
    add_up 0   O^T [256, ROWS] += V^T P^T      the first half of the columns
    add_up 1   the other half

Weights are computed for two tiles ahead. So products of scores, the softmax and products of sums go on at a time.

    words      [64 keys, 64] int16, for each of 4 boxes of 128 columns
    q_boxes    [8, ROWS, 64] float16, as in `coded_key_rows`
    weights    [2, 64, ROWS] float16: times the largest of each key's scales
    decays     [2, ROWS] float32: what the sums so far are multiplied by
    sums       4 x [64, ROWS] float32: even and odd columns of a box

Where a key has several scales, its values are multiplied by the ratio of theirs to the largest, in float16.
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

from .._common.attend import LOWEST
from .coded_scores import (
    AIM,
    LIMIT,
    begin_scores,
    greatest_of_warps,
    greatest_vote,
    pairs_of,
    place_queries,
    sum_of_pairs,
)
from .coded_tiles import BOXES, SOME, STEPS, load_tiles, values_of
from .key_rows import BOX, KEYS, RANK, VECTOR, hide, seen_by_all
from .named_tiles import COPIES, load_named
from .taken import ANY_VALUE, RECORD, TILE, keys_of, taken_by

BUFFERS = gl.constexpr(3)
QUERIES, SETTLED = gl.constexpr(0), gl.constexpr(1)
WEIGHED, SPENT = gl.constexpr(2), gl.constexpr(4)
FULL, FREE = gl.constexpr(6), gl.constexpr(6 + BUFFERS.value)
"""Indices of barriers: two of WEIGHED and SPENT, one for each buffer of FULL and FREE."""
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def weigh(
    tiles,
    q,
    passed,
    greatest,
    inputs,
    outputs,
    numbers,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    ROWS: gl.constexpr,
    NAMED: gl.constexpr,
):
    """Compute scores and weights of all tiles. Logarithms of scales say which of NAMED keys are hidden."""
    words, ropes, ratios, largest = tiles
    q_boxes, q_ropes, undo = q
    weights, decays, votes, shares, barriers = passed
    lengths, pieces = inputs
    lse, m_out, total_out = outputs
    queries, heads, tokens, part, tile, own, CAUSAL, LATE = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PAIRS: gl.constexpr = pairs_of(ROWS)
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    number = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        mbarrier.wait(barriers.index(QUERIES), turn & 1)
        seen = seen_by_all(end, count, queries, heads, tile, ROWS, CAUSAL)
        greatest.store(gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SCORES)))
        total = gl.zeros([32, ROWS], gl.float32, PAIRS)
        fresh = begin == begin  # whether no key has been seen yet
        for start in range(begin, end, TILE):
            buffer = number % BUFFERS
            slot = number & 1
            mbarrier.wait(barriers.index(FULL + buffer), number // BUFFERS & 1)
            top = largest.index(3 * buffer).load(gl.SliceLayout(1, SCORES))
            scores = begin_scores(
                words,
                buffer * BOXES,
                ropes.index(buffer),
                q_boxes,
                q_ropes,
                number >> 30,
                ratios.index(buffer),
                top,
                GROUPS,
                INT8,
                ROWS,
                NAMED,
            )
            factor = undo.load(gl.SliceLayout(0, SCORES))
            logarithm = largest.index(3 * buffer + 1).load(gl.SliceLayout(1, SCORES))
            inverse = largest.index(3 * buffer + 2).load(gl.SliceLayout(1, SCORES))
            m = greatest.load(gl.SliceLayout(0, SCORES))
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(barriers.index(FREE + buffer))
            # Of base 2 from here on, and with each key's scale.
            scores = scores * factor[None, :] + logarithm[:, None]
            if not NAMED and start + TILE - 1 > seen:
                scores = hide(scores, start, end, count, queries, heads, tile, ROWS, SCORES, CAUSAL)
            scores -= m[None, :]
            scaled = gl.exp2(scores)
            mbarrier.wait(barriers.index(SPENT + slot), 1 ^ (number // 2 & 1))
            weights.index(slot).store(scaled.to(gl.float16))
            votes.index(slot).store(greatest_of_warps(scores, ROWS))
            vote = greatest_vote(votes.index(slot))
            # Weights have been stored as if m were to stay, as it mostly is. It starts with the first key that is seen.
            if (vote > LIMIT) | fresh:
                rise = gl.max(scores, 0) - AIM
                rise = gl.where(fresh, gl.where(rise == -float("inf"), 0.0, rise), gl.maximum(rise, 0.0))
                decay = gl.where(fresh, 0.0, gl.exp2(-rise))
                scaled = gl.exp2(scores - rise[None, :])
                greatest.store(m + rise)
                weights.index(slot).store(scaled.to(gl.float16))
                decays.index(slot).store(decay)
                total = total * gl.convert_layout(decay, gl.SliceLayout(0, PAIRS))[None, :]
            fence_async_shared()
            mbarrier.arrive(barriers.index(WEIGHED + slot))
            total += sum_of_pairs(scaled * inverse[:, None], ROWS)
            fresh = fresh & (vote == -float("inf"))
            number += 1

        of_all = gl.convert_layout(gl.sum(total, 0), gl.SliceLayout(0, SCORES))
        saw = of_all != 0  # NaN too
        shares.store(gl.where(saw, 1.0 / of_all, 0.0))
        mbarrier.arrive(barriers.index(SETTLED))
        cut = (begin > 0) | (end < count)
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        exists = row < rows
        m = (greatest.load(gl.SliceLayout(0, SCORES)) + gl.log2(of_all)) * LN2
        if cut:
            slots = (2 * part + (begin == 0).to(gl.int32)) * rows
            gl.store(m_out + slots + row, gl.where(saw, m, LOWEST), mask=exists)
            gl.store(total_out + slots + row, gl.where(saw, 1.0, 0.0), mask=exists)
        else:
            gl.store(lse + group * rows + row, gl.where(saw, m, -float("inf")), mask=exists)
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if LATE:
        gdc_launch_dependents()


@gluon.jit
def add_up(
    tiles,
    q,
    passed,
    inputs,
    outputs,
    numbers,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    ROWS: gl.constexpr,
    WHO: gl.constexpr,
):
    """Add up half of the columns of the weighed values of all tiles."""
    words, ratios = tiles
    q_boxes, q_ropes, undo = q
    weights, decays, votes, shares, barriers = passed
    q_latent, q_rope, lengths, pieces = inputs
    o, acc = outputs
    scale, queries, heads, tokens, part, tile, own, LATE, strides = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    HALF: gl.constexpr = BOXES // 2
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    rows = queries * heads
    number = 0
    for turn in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        place_queries(
            q_boxes, q_ropes, undo, q_latent, q_rope, scale, group, rows, heads, tile + (turn >> 30), strides, ROWS, WHO
        )
        fence_async_shared()
        mbarrier.arrive(barriers.index(QUERIES))
        accs = ()
        for _ in gl.static_range(2 * HALF):
            accs += (gl.zeros([BOX, ROWS], gl.float32, SCORES),)
        fresh = begin == begin
        for _start in range(begin, end, TILE):
            buffer = number % BUFFERS
            slot = number & 1
            mbarrier.wait(barriers.index(FULL + buffer), number // BUFFERS & 1)
            first = buffer * BOXES + WHO * HALF
            of_ratios = ratios.index(buffer)
            a, b = values_of(words, first, of_ratios, 0, GROUPS, INT8, OPERAND, WHO)
            mbarrier.wait(barriers.index(WEIGHED + slot), number // 2 & 1)
            vote = greatest_vote(votes.index(slot))
            if (vote > LIMIT) | fresh:
                decay = decays.index(slot).load(gl.SliceLayout(0, SCORES))[None, :]
                accs = (accs[0] * decay, accs[1] * decay, accs[2] * decay, accs[3] * decay)
            sums = ()
            even = accs[0]
            odd = accs[1]
            for step in gl.static_range(HALF * STEPS):
                some = weights.index(slot).slice(step % STEPS * SOME, SOME)
                even = warpgroup_mma(a, some, even, is_async=True)
                odd = warpgroup_mma(b, some, odd, is_async=True)
                used = (a, b)
                if step + 1 < HALF * STEPS:
                    a, b = values_of(words, first, of_ratios, step + 1, GROUPS, INT8, OPERAND, WHO)
                else:
                    mbarrier.arrive(barriers.index(FREE + buffer))
                # Wait for the operands too, because their registers are read until the product is complete.
                done = warpgroup_mma_wait(0, deps=(even, odd, used[0], used[1]))
                even = done[0]
                odd = done[1]
                if step + 1 == STEPS:
                    sums = (even, odd)
                    even = accs[2]
                    odd = accs[3]
            accs = (sums[0], sums[1], even, odd)
            fresh = fresh & (vote == -float("inf"))
            mbarrier.arrive(barriers.index(SPENT + slot))
            number += 1

        mbarrier.wait(barriers.index(SETTLED), turn & 1)
        share = shares.load(gl.SliceLayout(0, SCORES))
        cut = (begin > 0) | (end < count)
        # What is the same for each sequence would be computed once, and kept on the stack.
        row = tile * ROWS + (turn >> 30) + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        there = (row < rows)[None, :]
        slots = gl.where(cut, (2 * part + (begin == 0).to(gl.int32)) * rows, group * rows).to(gl.int64)
        for box in gl.static_range(2 * HALF):
            column = (WHO * HALF + box // 2) * 2 * BOX + box % 2 + 2 * gl.arange(0, BOX, gl.SliceLayout(1, SCORES))
            places = row[None, :] * RANK + column[:, None]
            result = accs[box] * share[None, :]
            if cut:
                gl.store(acc + slots * RANK + places, result, mask=there)
            else:
                gl.store(o + slots * RANK + places, result.to(gl.bfloat16), mask=there)
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if LATE:
        gdc_launch_dependents()


@gluon.jit
def attend_tiles(
    keys,
    where,
    inputs,
    outputs,
    numbers,
    strides,
    CAUSAL: gl.constexpr,
    LATE: gl.constexpr,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    ROWS: gl.constexpr,
    NAMED: gl.constexpr,
):
    """What a program does, given where its keys are."""
    _, _, lengths, pieces = inputs
    o, lse, acc, m_out, total_out = outputs
    scale, queries, heads, tokens, own, part, tile = numbers
    words = gl.allocate_shared_memory(gl.int16, [BUFFERS * BOXES, TILE, BOX], KEYS)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, BOX], KEYS)
    q_boxes = gl.allocate_shared_memory(gl.float16, [2 * BOXES, ROWS, BOX], KEYS)
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BOX], KEYS)
    weights = gl.allocate_shared_memory(gl.float16, [2, TILE, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2))
    ratios = gl.allocate_shared_memory(gl.float16, [BUFFERS, GROUPS * TILE], VECTOR)
    largest = gl.allocate_shared_memory(gl.float32, [3 * BUFFERS, TILE], VECTOR)
    undo = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    decays = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    greatest = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    votes = gl.allocate_shared_memory(gl.float32, [2, 4], VECTOR)
    shares = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    barriers = gl.allocate_shared_memory(gl.int64, [6 + 2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(QUERIES), count=2)
    mbarrier.init(barriers.index(SETTLED), count=1)
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(WEIGHED + i), count=1)
        mbarrier.init(barriers.index(SPENT + i), count=2)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(FULL + i), count=1 + (COPIES if NAMED else 1))  # of scales, and of keys
        mbarrier.init(barriers.index(FREE + i), count=3)
    fence_async_shared()

    tiles = (words, ropes, ratios, largest)
    q = (q_boxes, q_ropes, undo)
    passed = (weights, decays, votes, shares, barriers)
    results = (lse, m_out, total_out)
    to_weigh = (queries, heads, tokens, part, tile, own, CAUSAL, LATE)
    to_add = (scale, queries, heads, tokens, part, tile, own, LATE, strides)
    gdc_wait()  # for what `share_out` stores
    gl.warp_specialize(
        [
            (
                load_named if NAMED else load_tiles,
                (words, ropes, (ratios, largest), barriers, keys, where, GROUPS, BUFFERS, FULL, FREE, True),
            ),
            (weigh, (tiles, q, passed, greatest, (lengths, pieces), results, to_weigh, GROUPS, INT8, ROWS, NAMED)),
            (add_up, ((words, ratios), q, passed, inputs, (o, acc), to_add, GROUPS, INT8, ROWS, 0)),
            (add_up, ((words, ratios), q, passed, inputs, (o, acc), to_add, GROUPS, INT8, ROWS, 1)),
        ],
        [4, 4, 4],
        [144, 168, 168],
    )


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
    ROWS: gl.constexpr,
):
    tiles = gl.cdiv(queries * heads, ROWS)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    keys = (words_of_pages, rope_keys, scales, (scale_stride_0, scale_stride_1, scale_stride_2))
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    numbers = (scale, queries, heads, tokens, own, part, tile)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    attend_tiles(
        keys,
        where,
        inputs,
        outputs,
        numbers,
        strides,
        CAUSAL,
        LATE,
        GROUPS,
        INT8,
        ROWS,
        NAMED=False,
    )
