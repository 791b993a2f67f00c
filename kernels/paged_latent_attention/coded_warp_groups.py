"""Decode over pages in FP8 on Hopper, in Gluon: the warp groups of `warp_groups`, of which the one that loads
also converts latents to bfloat16.

It loads strips of 64 tokens and 64 columns to registers, two at a time, and multiplies them by the scales of these
tokens on the way to shared memory, where the consumers find what TMA would have brought. A strip is loaded as soon as
another has left its registers, from the second-level cache, to which the page has been fetched before. Rope keys come
by TMA.

    latents    [pages, page_size, 128] int32: four e4m3fn codes each     the last stride of each is 1
    scales     [pages, page_size, G] float32                             each of 512 / G columns, at least 128
    ropes      a descriptor of all pages' rope keys [rows, 64], bfloat16, boxes [64, 64]
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .warp_groups import (
    FREE_OWN,
    FREE_REST,
    HALF,
    OWN,
    RECORD,
    REST,
    ROPE,
    TILE,
    attend_half,
    copy,
    keys_of,
    place_of,
    shared_memory,
    taken_by,
)

_DESCRIPTOR = gl.shared_memory_descriptor
reinterpret = _DESCRIPTOR.reinterpret if hasattr(_DESCRIPTOR, "reinterpret") else _DESCRIPTOR._reinterpret
"""The method's name from Triton 3.? on, or before."""
STRIP = gl.constexpr(64)
"""Columns of a strip: 16 words of four codes, or 32 words of two numbers in bfloat16."""
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""Four words of a row per thread."""
NUMBERS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""How `KEYS` lays out a strip of a half, in words."""
LINES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PREFETCHED = gl.constexpr("cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;")
CONVERTED = gl.constexpr(
    """{
    .reg .b16 a, b, a0, a1, b0, b1;
    .reg .b32 c, d;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 c, a;
    cvt.rn.f16x2.e4m3x2 d, b;
    mov.b32 {a0, a1}, c;
    mov.b32 {b0, b1}, d;
    cvt.f32.f16 f0, a0;
    cvt.f32.f16 f1, a1;
    cvt.f32.f16 f2, b0;
    cvt.f32.f16 f3, b1;
    mul.f32 f0, f0, $3;
    mul.f32 f1, f1, $3;
    mul.f32 f2, f2, $3;
    mul.f32 f3, f3, $3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)
"""From four codes and a scale to four numbers in bfloat16."""


@gluon.jit
def load_coded_pages(keys, ropes, barriers, rope_rows, cache, where, GROUP: gl.constexpr):
    """The producer: load and convert pages of all sequences of a piece, each part as soon as there is room."""
    table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, page_ropes = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    numbers = reinterpret(keys, gl.int32, [16, TILE, STRIP // 2], NUMBERS)
    free = 1
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        entries = table + group.to(gl.int64) * table_stride_0
        page_0, inside_0 = place_of(entries, table_stride_1, begin, end, page_tiles)
        begun = begin_half(cache, page_0, inside_0, end - begin, 0, GROUP)
        for first in range(begin, gl.maximum(end, begin + 1), 2 * TILE):
            left_0 = end - first
            left_1 = left_0 - TILE
            page_1, inside_1 = place_of(entries, table_stride_1, first + TILE, end, page_tiles)
            following, further = place_of(entries, table_stride_1, first + 2 * TILE, end, page_tiles)
            prefetch(cache, following, further, left_1 - TILE)
            last, at = place_of(entries, table_stride_1, first + 3 * TILE, end, page_tiles)
            prefetch(cache, last, at, left_1 - 2 * TILE)
            own_0, own_1 = (page_0, inside_0, left_0, 0), (page_1, inside_1, left_1, 1)
            rest_0, rest_1 = (page_0, inside_0, left_0, 1), (page_1, inside_1, left_1, 0)
            mbarrier.wait(barriers.index(FREE_OWN), free)
            begun = convert_half(numbers, 0, begun, cache, own_0, own_1, GROUP)
            tell(barriers.index(OWN))
            mbarrier.wait(barriers.index(FREE_OWN + 1), free)
            begun = convert_half(numbers, 3, begun, cache, own_1, rest_0, GROUP)
            tell(barriers.index(OWN + 1))
            mbarrier.wait(barriers.index(FREE_REST), free)
            load_ropes(ropes.index(0), barriers.index(REST), rope_rows, page_0, inside_0, left_0, page_ropes)
            begun = convert_half(numbers, 1, begun, cache, rest_0, rest_1, GROUP)
            tell(barriers.index(REST))
            mbarrier.wait(barriers.index(FREE_REST + 1), free)
            load_ropes(ropes.index(1), barriers.index(REST + 1), rope_rows, page_1, inside_1, left_1, page_ropes)
            begun = convert_half(numbers, 2, begun, cache, rest_1, (following, further, left_1 - TILE, 0), GROUP)
            tell(barriers.index(REST + 1))
            page_0, inside_0 = following, further
            free ^= 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1


@gluon.jit
def load_ropes(place, full, rope_rows, page, inside, left, page_ropes):
    """Load the rope keys of a tile of keys, if there are any; one arrival of the barrier."""
    if left > 0:
        mbarrier.expect(full, TILE * ROPE * 2)
        copy(rope_rows, [page.to(gl.int32) * page_ropes + inside, 0], full, place)
    else:
        mbarrier.arrive(full)


@gluon.jit
def prefetch(cache, page, inside, left):
    """Have the latents of a tile of keys brought to the second-level cache: 256 bytes for each thread."""
    latents, _, strides, _ = cache
    if left > 0:
        part = gl.arange(0, 2 * TILE, LINES)
        row = gl.minimum(part // 2, left - 1)
        corner = latents + page.to(gl.int64) * strides[0] + inside.to(gl.int64) * strides[1]
        lines = corner + (row * strides[1] + part % 2 * (HALF // 4))
        gl.inline_asm_elementwise(PREFETCHED, "=r,l", [lines], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_strip(cache, page, inside, left, HALF_INDEX: gl.constexpr, INDEX: gl.constexpr):
    """Load a strip of a tile of keys, words `[64, 16]`; 0 from token `left` on."""
    latents, _, strides, _ = cache
    row = gl.arange(0, TILE, gl.SliceLayout(1, CODES))
    word = (HALF_INDEX * HALF + INDEX * STRIP) // 4 + gl.arange(0, STRIP // 4, gl.SliceLayout(0, CODES))
    corner = latents + page.to(gl.int64) * strides[0] + inside.to(gl.int64) * strides[1]
    return gl.load(corner + (row[:, None] * strides[1] + word[None, :]), mask=(row < left)[:, None], other=0)


@gluon.jit
def load_scale(cache, page, inside, left, INDEX: gl.constexpr):
    """Load one of the scales of each token of a tile of keys, `[64]`; 0 from token `left` on."""
    _, scales, _, strides = cache
    row = gl.arange(0, TILE, gl.SliceLayout(1, CODES))
    corner = scales + page.to(gl.int64) * strides[0] + inside.to(gl.int64) * strides[1] + INDEX * strides[2]
    return gl.load(corner + row * strides[1], mask=row < left, other=0.0)


@gluon.jit
def begin_half(cache, page, inside, left, HALF_INDEX: gl.constexpr, GROUP: gl.constexpr):
    """Load the first two strips of half of the columns of a tile of keys, and their scale."""
    a = load_strip(cache, page, inside, left, HALF_INDEX, 0)
    b = load_strip(cache, page, inside, left, HALF_INDEX, 1)
    return a, b, load_scale(cache, page, inside, left, HALF_INDEX * HALF // GROUP)


@gluon.jit
def convert_half(numbers, TO: gl.constexpr, begun, cache, place, upcoming, GROUP: gl.constexpr):
    """Convert half of a tile of keys, which has begun to be loaded, into half TO of shared memory, and begin the
    upcoming one."""
    a, b, scale = begun
    page, inside, left, half = place
    numbers.index(4 * TO).store(in_bfloat16(a, scale))
    a = load_strip(cache, page, inside, left, half, 2)
    numbers.index(4 * TO + 1).store(in_bfloat16(b, scale))
    b = load_strip(cache, page, inside, left, half, 3)
    scale = load_scale(cache, page, inside, left, (half * HALF + HALF // 2) // GROUP)
    page, inside, left, half = upcoming
    numbers.index(4 * TO + 2).store(in_bfloat16(a, scale))
    a = load_strip(cache, page, inside, left, half, 0)
    numbers.index(4 * TO + 3).store(in_bfloat16(b, scale))
    b = load_strip(cache, page, inside, left, half, 1)
    return a, b, load_scale(cache, page, inside, left, half * HALF // GROUP)


@gluon.jit
def in_bfloat16(codes, scale):
    """A strip's numbers, words `[64, 32]`: its codes, words `[64, 16]`, times the scales of its tokens `[64]`."""
    low, high = gl.inline_asm_elementwise(
        CONVERTED, "=r,=r,r,f", [codes, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([TILE, STRIP // 2])


@gluon.jit
def tell(barrier):
    """Tell a consumer, whose products read it, that a part of a page is there."""
    fence_async_shared()
    mbarrier.arrive(barrier)


_ANY_VALUE = ("scale", "queries", "heads", "tokens", "own", "page_ropes", "table_stride_0")


@gluon.jit(do_not_specialize=_ANY_VALUE)
def attend_coded_pages(
    q_latent,
    q_rope,
    latents,
    scales,
    rope_rows,
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
    page_ropes,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    qr_stride_b,
    qr_stride_s,
    qr_stride_n,
    latent_stride_0,
    latent_stride_1,
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    table_stride_0,
    table_stride_1,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
):
    tiles = gl.cdiv(queries * heads, TILE)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    shared = shared_memory(2)  # rope keys arrive by themselves
    keys, ropes, _, _, _, _, barriers = shared
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    strides = (q_stride_b, q_stride_s, q_stride_n, qr_stride_b, qr_stride_s, qr_stride_n)
    numbers = (scale, queries, heads, tokens, part, tile, own, CAUSAL, strides)
    # Rows begin at multiples of 16 bytes.
    of_latents = (latent_stride_0 // 4 * 4, latent_stride_1 // 4 * 4)
    cache = (latents, scales, of_latents, (scale_stride_0, scale_stride_1, scale_stride_2))
    where = (table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, page_ropes)
    gl.warp_specialize(
        [
            (load_coded_pages, (keys, ropes, barriers, rope_rows, cache, where, GROUP)),
            (attend_half, (shared, inputs, outputs, numbers, 0)),
            (attend_half, (shared, inputs, outputs, numbers, 1)),
        ],
        [4, 4],
        [216, 216],
    )
