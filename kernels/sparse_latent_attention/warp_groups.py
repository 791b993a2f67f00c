"""Attention to named keys in FP8 or INT8 on Hopper, in Gluon: as `coded_warp_groups` does it, but for how it loads.

Each query is a sequence of `topk` keys, and its heads are the rows. `named_tiles` says how these keys are loaded, other
arguments are as in `coded_warp_groups`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..paged_latent_attention.coded_warp_groups import attend_tiles
from ..paged_latent_attention.taken import RECORD

_ANY_VALUE = ("scale", "queries", "heads", "tokens", "own", "cached", "offset")


@gluon.jit(do_not_specialize=_ANY_VALUE)
def attend_named(
    q_latent,
    q_rope,
    words_of_rows,
    rope_keys,
    scales,
    indices,
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
    cached,
    offset,
    q_stride_g,
    q_stride_n,
    qr_stride_g,
    qr_stride_n,
    words_stride_b,
    words_stride_t,
    rope_stride_b,
    rope_stride_t,
    scale_stride_b,
    scale_stride_t,
    scale_stride_g,
    index_stride_b,
    index_stride_s,
    index_stride_k,
    CAUSAL: gl.constexpr,
    LATE: gl.constexpr,
    GROUPS: gl.constexpr,
    INT8: gl.constexpr,
    ROWS: gl.constexpr,
):
    tiles = gl.cdiv(heads, ROWS)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    pieces += part * RECORD

    of_rows = (words_stride_b, words_stride_t, rope_stride_b, rope_stride_t)
    of_scales = (scale_stride_b, scale_stride_t, scale_stride_g)
    of_indices = (index_stride_b, index_stride_s, index_stride_k)
    keys = (words_of_rows, rope_keys, scales, of_rows, of_scales, of_indices)
    where = (indices, lengths, pieces, tokens, own, queries, cached, offset, CAUSAL, LATE)
    inputs = (q_latent, q_rope, lengths, pieces)
    outputs = (o, lse, acc, m_out, total_out)
    numbers = (scale, 1, heads, tokens, own, part, tile)
    q_strides = (q_stride_g, 0, q_stride_n, qr_stride_g, 0, qr_stride_n)
    attend_tiles(
        keys,
        where,
        inputs,
        outputs,
        numbers,
        q_strides,
        False,
        LATE,
        GROUPS,
        INT8,
        ROWS,
        NAMED=True,
    )
