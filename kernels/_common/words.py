"""Latents in FP8 or INT8 for up to 32 rows: loaded as words of two codes each, and multiplied as float16.

A code of a key in shared memory is read twice, once as a part of the key and once as a part of the value. As words of
16 bits both are read by matrix loads, and are converted in registers: what is written to shared memory are the codes
alone. A word gives a number of an even and a number of an odd column, and each of these is a product of its own. The
columns of a scale are a group; what follows is per group.

    words     [KEYS, GROUP / 2]                        int16: the even column's code in the lower byte
    queries   [ROWS, GROUP / 2], two for each group    float16: even and odd columns, times a power of two for each row
    sums      [ROWS, GROUP / 2], two for each group    float32

Each code is a float16. So are the queries, whose rounding to 8 bits float16 keeps: scores are exact but for float32
sums. Values are not multiplied by their scales; the weights are, in float32, before they are rounded to float16. These
products are kept below 2^14 in each row: the greatest is chosen for scores plus logarithms of scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import LOG2E, LOWEST
from .blocks import load_rows

HEADROOM = tl.constexpr(9.704060527839234)
"""The logarithm of 2^14, to which the greatest weight of a row is raised: smaller ones then lose no bits above 2^-28 of
it."""
LEAST_SCALE = tl.constexpr(2.0**-60)
"""Scales below this count as this much where the greatest weight is chosen, so that sums of weights stay finite."""


def in_one_line(lines: str) -> tl.constexpr:
    """In one line: torch 2.11 writes an escaped character of a constant, such as a new line, unescaped."""
    return tl.constexpr(" ".join(lines.split()))


FROM_E4M3 = in_one_line("""{
    .reg .b16 lower, upper;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {lower, upper}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
}""")
"""Of two words $2: the numbers of their lower bytes $0, and of their upper bytes $1, two float16 each."""
FROM_E4M3_BITS = in_one_line("""{
    .reg .b32 up, codes, nan, sign, even, odd;
    mov.b32 up, 0x5c005c00;
    and.b32 codes, $2, 0x7f7f7f7f;
    add.u32 nan, codes, 0x01010101;
    and.b32 nan, nan, 0x80808080;
    or.b32 codes, codes, nan;
    and.b32 even, codes, 0x00ff00ff;
    shl.b32 even, even, 7;
    and.b32 sign, $2, 0x00800080;
    shl.b32 sign, sign, 8;
    or.b32 even, even, sign;
    shr.u32 odd, codes, 1;
    and.b32 odd, odd, 0x7f807f80;
    and.b32 sign, $2, 0x80008000;
    or.b32 odd, odd, sign;
    mul.rn.f16x2 $0, even, up;
    mul.rn.f16x2 $1, odd, up;
}""")
"""The same where hardware has no conversion: the bits of a float16 2^8 times smaller. A code of seven ones is NaN, and
gets the highest bit of the float16's exponent too."""
FROM_INT8 = in_one_line("""{
    .reg .b32 raised, above;
    mov.b32 above, 0xe480e480;
    xor.b32 raised, $2, 0x80808080;
    prmt.b32 $0, raised, 0x64646464, 0x4240;
    prmt.b32 $1, raised, 0x64646464, 0x4341;
    add.rn.f16x2 $0, $0, above;
    add.rn.f16x2 $1, $1, above;
}""")
"""The same of int8: a byte below 0x64 is the float16 1024 + byte, to which -(1024 + 128) is added."""


@triton.jit
def numbers_of(words, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """The float16 of even and of odd columns."""
    ASSEMBLY: tl.constexpr = FROM_INT8 if INT8 else FROM_E4M3 if NATIVE else FROM_E4M3_BITS
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def load_queries(base, offsets, exists, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Load queries, and return them with what undoes the power of two of each row, `[ROWS]` in float32."""
    ROWS: tl.constexpr = offsets.shape[0]
    top = tl.zeros([ROWS], tl.float32)
    loaded = ()
    for g in tl.static_range(GROUPS):
        columns = g * GROUP + tl.arange(0, GROUP)
        of_group = tl.load(base + (offsets[:, None] + columns[None, :]), mask=exists[:, None], other=0)
        top = tl.maximum(top, tl.max(tl.abs(of_group.to(tl.float32)), 1))
        even, odd = tl.split(tl.reshape(of_group, (ROWS, GROUP // 2, 2)))
        loaded += (even, odd)
    # The power that brings the greatest magnitude of a row to [2^14, 2^15), as the exponent of a float32.
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15)
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    queries = ()
    for i in tl.static_range(2 * GROUPS):
        queries += ((loaded[i].to(tl.float32) * power[:, None]).to(tl.float16),)
    return queries, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def no_sums_of_words(ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Zeros, float32."""
    sums = ()
    for _ in tl.static_range(2 * GROUPS):
        sums += (tl.zeros([ROWS, GROUP // 2], tl.float32),)
    return sums


@triton.jit
def scores_of_words(
    queries,
    base,
    offsets,
    seen,
    scales,
    scale_offsets,
    scale_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load a tile of keys: scores `[ROWS, KEYS]`, words and scales `[KEYS]` of each group."""
    KEYS: tl.constexpr = offsets.shape[0]
    HALF: tl.constexpr = GROUP // 2
    scores = tl.zeros([queries[0].shape[0], KEYS], tl.float32)
    words = ()
    loaded = ()
    for g in tl.static_range(GROUPS):
        of_group = load_rows(base, offsets, seen, g * HALF, GROUPS * HALF, HALF)
        scale = tl.load(scales + scale_offsets + g * scale_stride, mask=seen, other=0.0)
        even, odd = numbers_of(tl.trans(of_group), INT8, NATIVE)
        scores += tl.dot(queries[2 * g + 1], odd, tl.dot(queries[2 * g], even)) * scale[None, :]
        words += (of_group,)
        loaded += (scale,)
    return scores, words, loaded


@triton.jit
def add_words(m, total, sums, scores, words, scales, GROUPS: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """Add one more tile of keys to the state: scores `[ROWS, KEYS]`, -inf where hidden.

    As in `attend.add_keys`, but for m, which is the greatest score plus logarithm of a scale, less 2^14's.
    """
    largest = tl.abs(scales[0])
    for g in tl.static_range(1, GROUPS):
        largest = tl.maximum(largest, tl.abs(scales[g]))
    weighed = scores + tl.log(tl.maximum(largest, LEAST_SCALE))[None, :]
    m_new = tl.maximum(m, tl.max(weighed, 1) - HEADROOM)
    weights = tl.exp2((scores - m_new[:, None]) * LOG2E)
    decay = tl.exp2((m - m_new) * LOG2E)
    total = total * decay + tl.sum(weights, 1)
    added = ()
    for g in tl.static_range(GROUPS):
        of_group = (weights * scales[g][None, :]).to(tl.float16)
        even, odd = numbers_of(words[g], INT8, NATIVE)
        added += (
            tl.dot(of_group, even, sums[2 * g] * decay[:, None]),
            tl.dot(of_group, odd, sums[2 * g + 1] * decay[:, None]),
        )
    return m_new, total, added


@triton.jit
def settled(m, total, sums, GROUPS: tl.constexpr):
    """The state with a total of 1, of rows that saw a key, and the sums of each group with its columns in order."""
    saw = total != 0  # NaN too
    share = tl.where(saw, 1.0 / total, 0.0)[:, None]
    m = tl.where(saw, m + tl.log(total), LOWEST)
    joined = ()
    for g in tl.static_range(GROUPS):
        both = tl.join(sums[2 * g] * share, sums[2 * g + 1] * share)  # [ROWS, GROUP / 2, 2]
        joined += (tl.reshape(both, (both.shape[0], both.shape[1] * 2)),)
    return m, tl.where(saw, 1.0, 0.0), joined
