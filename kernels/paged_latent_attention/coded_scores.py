"""Queries, scores and the greatest weights of `coded_warp_groups`.

q_boxes    [8, ROWS, 64] float16, times a power of two for each row: columns 0, 1, 4, 5 ... of a box, then 2, 3 ...
q_ropes    [ROWS, 64] bfloat16, times the same
undo       [ROWS] float32: what undoes it, times what scores are multiplied with to be of base 2
scores     [64 keys, ROWS] float32
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .._common.attend import LOG2E
from .coded_tiles import BOXES, IN_PAIRS, keys_of_box
from .key_rows import BOX
from .taken import TILE

AIM, LIMIT = gl.constexpr(7.0), gl.constexpr(15.5)
"""The power of 2 to which the greatest weight of a row is raised, and the one up to which weights may grow, before
sums are multiplied. Then it seldom happens, and weights lose no bits above 2^-21 of the greatest."""


@gluon.constexpr_function
def pairs_of(ROWS):
    """The layout of `[32, ROWS]`: scores, with every second group of 8 keys left out."""
    registers = [[0, 1], *([0, 2**i] for i in range(3, ROWS.bit_length() - 1))]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, ROWS]
    )


@gluon.jit
def place_queries(
    q_boxes,
    q_ropes,
    undo,
    q_latent,
    q_rope,
    scale,
    group,
    rows,
    heads,
    tile,
    strides,
    ROWS: gl.constexpr,
    WHO: gl.constexpr,
):
    """Load the queries of half of the rows of a sequence to shared memory; 0 for rows that do not exist.

    With them goes what undoes the power of two of each row, `[ROWS]`.
    """
    HALF: gl.constexpr = ROWS // 2
    column = gl.arange(0, BOX, gl.SliceLayout(0, IN_PAIRS))
    row = tile * ROWS + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, IN_PAIRS))
    exists = (row < rows)[:, None]
    query = (row // heads).to(gl.int64)
    head = (row % heads).to(gl.int64)
    group = group.to(gl.int64)
    of_rows = group * strides[3] + query * strides[4] + head * strides[5]
    of_rope = gl.load(q_rope + (of_rows[:, None] + column[None, :]), mask=exists, other=0.0).to(gl.float32)
    # So that rope queries stay finite, they count too where they are far greater.
    top = gl.maximum(of_rope, -of_rope) * 2.0**-64
    of_rows = group * strides[0] + query * strides[1] + head * strides[2]
    places = of_rows[:, None] + (column // 2 * 4 + column % 2)[None, :]
    # Loops, as unrolled code that runs once is waited for. Queries are read twice, the second time from a cache.
    for box in range(BOXES):
        for part in gl.static_range(2):
            values = gl.load(q_latent + (places + (2 * BOX * box + 2 * part)), mask=exists, other=0.0).to(gl.float32)
            top = gl.maximum(top, gl.maximum(values, -values))
    # The power that brings the greatest magnitude of a row to [2^14, 2^15), as the exponent of a float32.
    exponent = gl.maximum(gl.cast(gl.max(top, 1), gl.int32, bitcast=True) >> 23, 15)
    power = gl.cast((268 - exponent) << 23, gl.float32, bitcast=True)[:, None]
    for box in range(BOXES):
        for part in gl.static_range(2):
            values = gl.load(q_latent + (places + (2 * BOX * box + 2 * part)), mask=exists, other=0.0).to(gl.float32)
            q_boxes.index(2 * box + part).slice(WHO * HALF, HALF).store((values * power).to(gl.float16))
    q_ropes.slice(WHO * HALF, HALF).store((of_rope * power).to(gl.bfloat16))
    undo.slice(WHO * HALF, HALF).store(gl.cast((exponent - 14) << 23, gl.float32, bitcast=True) * (scale * LOG2E))


@gluon.jit
def begin_scores(
    words,
    first,
    rope,
    q_boxes,
    q_ropes,
    zero,
    ratios,
    top,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    ROWS: gl.constexpr,
    NAMED: gl.constexpr,
):
    """Scores `[64, ROWS]` of a tile whose first box is `first`, times each row's power of two; to be waited for.

    Rope keys of named keys are read by threads, as threads wrote them: the tensor cores would need a fence.
    `zero` is always 0, which the assembler does not see: it would keep all addresses of queries in registers.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    product = gl.zeros([TILE, ROWS], gl.float32, SCORES)
    ratio_of = ()
    for of in gl.static_range(GROUPS):
        ratio_of += (ratios.slice(of * TILE, TILE).load(gl.SliceLayout(1, OPERAND)),)
    codes = words.index(first).load(OPERAND)
    used = (product, product)
    for box in gl.static_range(BOXES):
        ratio = ratio_of[box * GROUPS // BOXES]
        for half in gl.static_range(2):
            part = keys_of_box(codes, ratio, half, GROUPS, INT8)
            if half == 1 and box + 1 < BOXES:
                codes = words.index(first + box + 1).load(OPERAND)
            of_box = q_boxes.index(zero + 2 * box + half).permute((1, 0))
            product = warpgroup_mma(part, of_box, product, use_acc=box + half > 0, is_async=True)
            # Wait for the operands too, because their registers are read until the product is complete.
            if box > 0:
                done = warpgroup_mma_wait(2, deps=(product, used[0]))
                product = done[0]
            used = (used[1], part)
    done = warpgroup_mma_wait(0, deps=(product, used[0], used[1]))
    scores = done[0] * top[:, None]
    if NAMED:
        rope = rope.load(OPERAND)
    return warpgroup_mma(rope, q_ropes.permute((1, 0)), scores, is_async=True)


@gluon.jit
def greatest_of_warps(x, ROWS: gl.constexpr):
    """The greatest of what each warp has of `[64, ROWS]`, `[4]`: of each thread first."""
    x = gl.max(x.reshape([4, 2, 8, ROWS // 8, 4, 2]), 1)
    x = gl.max(gl.max(x, 4), 2)
    return gl.max(x.reshape([4, 32]), 1)


@gluon.jit
def greatest_vote(votes):
    """The greatest power of a weight of a tile, by what each warp has."""
    return gl.max(votes.load(gl.BlockedLayout([4], [32], [4], [0])), 0)


@gluon.jit
def sum_of_pairs(weights, ROWS: gl.constexpr):
    """Sums `[32, ROWS]` of what each thread has of `[64, ROWS]`: of keys that are 8 apart."""
    return gl.convert_layout(gl.sum(weights.reshape([4, 2, 8, ROWS]), 1).reshape([32, ROWS]), pairs_of(ROWS))
