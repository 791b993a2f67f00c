"""Quantise one group of one token's columns, or copy its rope key, into a row of the cache.

    latent [tokens, L], rope [tokens, R]      any strides
    slots  [tokens]
    numbers, scales, rope_out                 parts of the rows, `[pages, page_size, ...]`, with a last stride of 1

With ONE_SCALE the latent is one group, and it and the rope key are both quantised with the given scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(2.0**-100)
MOST = tl.constexpr(448.0)


@triton.jit
def to_e4m3(value):
    """FP8 (e4m3fn) bytes of float32 numbers of at most 448, rounded to nearest, ties to even.

    Each number is rounded to a multiple of the FP8 step at its magnitude. 2^8 times smaller, it then is a float16 whose
    upper bits are the FP8 number. Not every architecture has an instruction for this; done so, all give the same bytes.
    """
    word = value.to(tl.uint32, bitcast=True)
    exponent = tl.maximum((word >> 23) & 0xFF, 121)  # at least that of 2^-6, below which the step is constant
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    per_step = ((257 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / step: a division may not be exact
    steps = tl.abs(value) * per_step + 8388608.0  # where floats are 1 apart
    half = ((steps - 8388608.0) * step * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)
    magnitude = tl.where(value == value, half >> 7, 0x7F)
    return (magnitude | ((word >> 24) & 0x80).to(tl.uint16)).to(tl.uint8)


@triton.jit(do_not_specialize=("page_size",))
def append(
    latent,
    rope,
    slots,
    numbers,
    scales,
    rope_out,
    scale,
    page_size,
    latent_stride_t,
    latent_stride_l,
    rope_stride_t,
    rope_stride_r,
    numbers_stride_0,
    numbers_stride_1,
    scales_stride_0,
    scales_stride_1,
    rope_out_stride_0,
    rope_out_stride_1,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // page_size
    row = slot % page_size
    if group < GROUPS:
        column = group * GROUP + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < GROUP
        value = tl.load(latent + token * latent_stride_t + column * latent_stride_l, mask=inside, other=0)
        value = value.to(tl.float32)
        if ONE_SCALE:
            value = tl.div_rn(value, tl.load(scale))
            value = tl.where(value == value, tl.minimum(tl.maximum(value, -MOST), MOST), value)
        else:
            own = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
            own = tl.div_rn(own, MOST)
            tl.store(scales + page * scales_stride_0 + row * scales_stride_1 + group, own)
            value = tl.div_rn(value, own)
        tl.store(numbers + page * numbers_stride_0 + row * numbers_stride_1 + column, to_e4m3(value), mask=inside)
    else:
        rope_column = tl.arange(0, ROPE)
        rope_inside = rope_column < R
        part = tl.load(rope + token * rope_stride_t + rope_column * rope_stride_r, mask=rope_inside, other=0)
        target = rope_out + page * rope_out_stride_0 + row * rope_out_stride_1 + rope_column
        if ONE_SCALE:
            part = tl.div_rn(part.to(tl.float32), tl.load(scale))
            part = tl.where(part == part, tl.minimum(tl.maximum(part, -MOST), MOST), part)
            tl.store(target, to_e4m3(part), mask=rope_inside)
        else:
            tl.store(target, part, mask=rope_inside)
