"""Tiles of keys in FP8 or INT8, for the kernels in Gluon on Hopper: how they are loaded, and how codes are converted.

Codes are loaded as `words` of two, by TMA, and read by matrix loads: as keys row by row, as values transposed. They are
converted in registers, from which the tensor cores read the left side of a product.

    words      [64 keys, 64] int16, for each of 4 boxes of 128 columns
    numbers    [64 keys, 64] float16 of keys, or [64, keys] of values: each the left side of a product

Two neighbouring words, which are in one register, have four neighbouring columns of a key. Converted, the first two are
neighbours in one operand, and the last two in another, so queries have their columns in this order. Of values, two
words have two columns of two keys, and a permutation of bytes puts the keys of a column side by side.

The loader brings scales to shared memory, with what is computed of them: were consumers to load them, each of their
fences would wait for that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from .._common.words import FROM_E4M3, FROM_INT8, LEAST_SCALE, in_one_line
from .key_rows import BOX
from .taken import TILE, box_of, keys_of, load_box, rows_before, taken_by

BOXES = gl.constexpr(4)
"""Boxes of the words of a tile."""
IN_PAIRS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""A row for each warp."""
SOME = gl.constexpr(16)
"""Keys whose values are converted at a time."""
STEPS = gl.constexpr(TILE.value // SOME.value)
"""Steps of a box."""
PAIRS_OF_E4M3 = in_one_line("""{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")
"""Of two words $2: the two numbers of the first $0, and of the second $1."""
PAIRS_OF_INT8 = in_one_line("""{
    .reg .b32 raised, above;
    mov.b32 above, 0xe480e480;
    xor.b32 raised, $2, 0x80808080;
    prmt.b32 $0, raised, 0x64646464, 0x4140;
    prmt.b32 $1, raised, 0x64646464, 0x4342;
    add.rn.f16x2 $0, $0, above;
    add.rn.f16x2 $1, $1, above;
}""")
SCALED_E4M3, SCALED_INT8 = (
    gl.constexpr(each.value.removesuffix("}") + "mul.rn.f16x2 $0, $0, $3; mul.rn.f16x2 $1, $1, $3; }")
    for each in (FROM_E4M3, FROM_INT8)
)
"""As `FROM_E4M3` and `FROM_INT8`, times two float16 $3."""


@gluon.jit
def numbers_of(words, AS_KEYS: gl.constexpr, INT8: gl.constexpr):
    """Two operands of the float16 of codes. Of keys: of each two neighbouring words those of the first, and of the
    second; of values: those of each word's lower byte, and of its upper byte."""
    if AS_KEYS:
        ASSEMBLY: gl.constexpr = PAIRS_OF_INT8 if INT8 else PAIRS_OF_E4M3
    else:
        ASSEMBLY: gl.constexpr = FROM_INT8 if INT8 else FROM_E4M3
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.constexpr_function
def key_assembly(PART, SCALED, INT8):
    """Of two neighbouring words $1 the two numbers of one, times two float16 $2 if they are scaled."""
    scaled = "mul.rn.f16x2 $0, $0, $2;" if SCALED else ""
    if INT8:
        chosen = "0x4342" if PART else "0x4140"
        return (
            "{ .reg .b32 raised, above; mov.b32 above, 0xe480e480; xor.b32 raised, $1, 0x80808080; "
            f"prmt.b32 $0, raised, 0x64646464, {chosen}; add.rn.f16x2 $0, $0, above; {scaled} }}"
        )
    word = "second" if PART else "first"
    return f"{{ .reg .b16 first, second; mov.b32 {{first, second}}, $1; cvt.rn.f16x2.e4m3x2 $0, {word}; {scaled} }}"


@gluon.jit
def keys_of_box(codes, ratio, PART: gl.constexpr, GROUPS: gl.constexpr, INT8: gl.constexpr):
    """Columns of a box of keys, `[64 keys, 64]`: of each four the first two, or the others."""
    ASSEMBLY: gl.constexpr = key_assembly(PART, GROUPS > 1, INT8)
    if GROUPS == 1:
        numbers = gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [codes], dtype=gl.float16, is_pure=True, pack=2)
    else:
        both = [codes, ratio[:, None]]
        numbers = gl.inline_asm_elementwise(ASSEMBLY, "=&r,r,r", both, dtype=gl.float16, is_pure=True, pack=2)
    return numbers


@gluon.jit
def scaled_values_of(words, ratios, INT8: gl.constexpr):
    """The float16 of words of values: of their lower and their upper bytes, times the ratio of each key's scale."""
    ASSEMBLY: gl.constexpr = SCALED_INT8 if INT8 else SCALED_E4M3
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,r,r", [words, ratios], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def values_of(
    words,
    first,
    ratios,
    STEP: gl.constexpr,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    OPERAND: gl.constexpr,
    WHO: gl.constexpr,
):
    """The even and the odd columns of SOME keys of a box of values, `[64, SOME]`."""
    codes = words.index(first + STEP // STEPS).slice(STEP % STEPS * SOME, SOME).permute((1, 0)).load(OPERAND)
    if GROUPS == 1:
        even, odd = numbers_of(codes, False, INT8)
    else:
        OF_GROUP: gl.constexpr = (WHO * BOXES // 2 + STEP // STEPS) * GROUPS // BOXES
        ratio = ratios.slice(OF_GROUP * TILE + STEP % STEPS * SOME, SOME).load(gl.SliceLayout(0, OPERAND))
        even, odd = scaled_values_of(codes, ratio[None, :], INT8)
    return even, odd


@gluon.jit
def load_scales(scales, strides, page, first_row, before, GROUPS: gl.constexpr):
    """The scales `[64, GROUPS]` of a box of keys; 0 for its first rows, which lie before the tile."""
    # Two threads for each key, side by side, so that a warp asks for its scales once.
    EACH: gl.constexpr = gl.BlockedLayout([1, (GROUPS + 1) // 2], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, EACH))
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, EACH))
    of_keys = page.to(gl.int64) * strides[0] + (first_row + row).to(gl.int64) * strides[1]
    places = of_keys[:, None] + (group * strides[2])[None, :]
    return gl.load(scales + places, mask=(row >= before)[:, None], other=0.0)


@gluon.jit
def place_factors(scale_of, memories, buffer, full, GROUPS: gl.constexpr):
    """Store the scales of a tile, and the logarithm of each key's largest one."""
    factors, largest = memories
    factors.index(buffer).store(scale_of.permute((1, 0)).reshape([GROUPS * TILE]))
    top = gl.max(gl.maximum(scale_of, -scale_of), 1)
    largest.index(buffer).store(gl.log(gl.maximum(top, LEAST_SCALE)))
    mbarrier.arrive(full)


@gluon.jit
def place_ratios(scale_of, hidden, memories, buffer, full, GROUPS: gl.constexpr):
    """Store the largest scale of each key, its logarithm of base 2 and its inverse, and the ratios of scales to it.

    `hidden` is added to logarithms: 0, or -inf for keys that are not seen.
    """
    ratios, largest = memories
    top = gl.maximum(gl.max(gl.maximum(scale_of, -scale_of), 1), LEAST_SCALE)
    inverse = 1.0 / top
    largest.index(3 * buffer).store(top)
    largest.index(3 * buffer + 1).store(gl.log2(top) + hidden)
    largest.index(3 * buffer + 2).store(inverse)
    ratio = (scale_of * inverse[:, None]).to(gl.float16)
    ratios.index(buffer).store(ratio.permute((1, 0)).reshape([GROUPS * TILE]))
    mbarrier.arrive(full)


@gluon.jit
def load_tiles(
    words,
    ropes,
    memories,
    barriers,
    pages,
    where,
    GROUPS: gl.constexpr,
    BUFFERS: gl.constexpr,
    FULL: gl.constexpr,
    FREE: gl.constexpr,
    RATIOS: gl.constexpr,
):
    """The producer: load tiles of all sequences of a piece as soon as there is room.

    Of the barriers from FULL on a tile completes one, once its boxes and its scales are there; those from FREE on are
    waited for.
    """
    words_of_pages, rope_keys, scales, strides = pages
    table, lengths, pieces, tokens, own, table_stride_0, table_stride_1, page_tiles, LATE = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    loaded = 0
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        entries = table + group.to(gl.int64) * table_stride_0
        # Where a tile is, is loaded a tile before its scales, and these a tile before they are wanted.
        page, row = box_of(entries, table_stride_1, begin, end, page_tiles)
        upcoming = box_of(entries, table_stride_1, begin + TILE, end, page_tiles)
        scale_of = load_scales(scales, strides, page, row, rows_before(begin, end), GROUPS)
        for start in range(begin, end, TILE):
            later = box_of(entries, table_stride_1, start + 2 * TILE, end, page_tiles)
            buffer = loaded % BUFFERS
            mbarrier.wait(barriers.index(FREE + buffer), 1 ^ (loaded // BUFFERS & 1))
            full = barriers.index(FULL + buffer)
            mbarrier.expect(full, TILE * (BOXES + 1) * BOX * 2)
            for box in gl.static_range(BOXES):
                load_box(words_of_pages, page, row, box * BOX, full, words.index(buffer * BOXES + box))
            load_box(rope_keys, page, row, 0, full, ropes.index(buffer))
            if RATIOS:
                place_ratios(scale_of, 0.0, memories, buffer, full, GROUPS)
            else:
                place_factors(scale_of, memories, buffer, full, GROUPS)
            page, row = upcoming
            scale_of = load_scales(scales, strides, page, row, rows_before(start + TILE, end), GROUPS)
            upcoming = later
            loaded += 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if not LATE:
        gdc_launch_dependents()  # of `combine`: the last keys are on their way
