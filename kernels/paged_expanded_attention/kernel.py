"""Gather the latents and rope keys of a chunk from their pages, and apply their scales.

    latent, rope             [pages, page_size, L], [pages, page_size, R]     any strides but 1 in the last dim
    scales                   [pages, page_size, G], any strides, 0 where it broadcasts
    table [B, max_pages], stops [B]
    latent_out, rope_out     [B, C, L], [B, C, R]                             contiguous

A program takes a tile of positions of one sequence. From the sequence's stop on nothing is read, and zeros are written:
the outputs are read by a library's product, in which the numbers of one row may affect other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.attend import aligned, load_latents
from .._common.blocks import store_columns


@triton.jit(do_not_specialize=("begin", "keys", "page_size"))
def gather_chunk(
    latent,
    rope,
    scales,
    table,
    stops,
    latent_out,
    rope_out,
    begin,
    keys,
    page_size,
    latent_stride_0,
    latent_stride_1,
    rope_stride_0,
    rope_stride_1,
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    table_stride_0,
    table_stride_1,
    L: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROPE: tl.constexpr,
    CODED: tl.constexpr,
    CODED_ROPE: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    SAME_A: tl.constexpr,
    SAME_B: tl.constexpr,
    KEYS: tl.constexpr,
):
    tiles = tl.cdiv(keys, KEYS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    place = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)  # [KEYS], in the chunk
    position = begin + place
    exists = place < keys
    seen = exists & (position < tl.load(stops + b).to(tl.int32))
    entries = table + b * table_stride_0 + (position // page_size).to(tl.int64) * table_stride_1
    page = tl.load(entries, mask=seen, other=0).to(tl.int64)
    row = (position % page_size).to(tl.int64)
    scale_offsets = page * scale_stride_0 + row * scale_stride_1
    dtype: tl.constexpr = latent_out.dtype.element_ty
    out = b * keys + place  # rows of the outputs

    offsets = page * latent_stride_0 + row * latent_stride_1
    latent_a = load_latents(
        *(latent, offsets, seen, scales, scale_offsets, scale_stride_2),
        *(dtype, 0, L, A, CODED, NATIVE, GROUP, SAME_A),
    )  # [KEYS, A]
    store_columns(latent_out, out * L, latent_a, exists, 0, L, A)
    if B:
        latent_b = load_latents(
            *(latent, offsets, seen, scales, scale_offsets, scale_stride_2),
            *(dtype, A, L, B, CODED, NATIVE, GROUP, SAME_B),
        )  # [KEYS, B]
        store_columns(latent_out, out * L, latent_b, exists, A, L, B)
    if R:
        offsets = page * aligned(rope_stride_0, ROPE_ALIGN) + row * aligned(rope_stride_1, ROPE_ALIGN)
        k_rope = load_latents(
            *(rope, offsets, seen, scales, scale_offsets, scale_stride_2),
            *(dtype, 0, R, ROPE, CODED_ROPE, NATIVE, R, ROPE),
        )  # [KEYS, ROPE]
        store_columns(rope_out, out * R, k_rope, exists, 0, R, ROPE)
