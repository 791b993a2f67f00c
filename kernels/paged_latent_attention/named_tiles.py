"""Tiles of named keys in FP8 or INT8, for `coded_warp_groups`: copied row by row, 16 bytes a thread, 0 for no key.

    words, ropes     rows of the cache `[B, T, 256]` int16 and `[B, T, 64]` bfloat16, at multiples of 8 numbers
    indices          `[B, Sq, topk]`: keys below 0 or from T on, or later than a causal limit, are none

Whether a key is seen goes with its scales, as the logarithm of a factor of 1 or 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from .coded_tiles import BOXES, place_ratios
from .key_rows import BOX, LOADED
from .taken import TILE, keys_of, taken_by

copy_rows = async_copy.async_load if "async_load" in async_copy.__all__ else async_copy.async_copy_global_to_shared
"""The copy's name from Triton 3.7 on, or up to 3.6."""
copies_arrive = async_copy.mbarrier_arrive
COPIES = gl.constexpr(128)
"""Arrivals of the copies of a tile: one of each thread."""


@gluon.jit
def names_of(entries, stride, start, end, LAYOUT: gl.constexpr):
    """The names of a tile of keys from `start` on; -1 from `end` on."""
    place = start + gl.arange(0, TILE, LAYOUT)
    return gl.load(entries + place.to(gl.int64) * stride, mask=place < end, other=-1)


@gluon.jit
def load_named(
    words,
    ropes,
    memories,
    barriers,
    keys,
    where,
    GROUPS: gl.constexpr,
    BUFFERS: gl.constexpr,
    FULL: gl.constexpr,
    FREE: gl.constexpr,
    _RATIOS: gl.constexpr,
):
    """The producer: copy the keys that the queries of a piece name as soon as there is room."""
    # Two threads for each key, side by side, so that a warp asks for its scales once.
    EACH: gl.constexpr = gl.BlockedLayout([1, (GROUPS + 1) // 2], [16, 2], [4, 1], [1, 0])
    words_of_rows, rope_keys, scales, of_rows, of_scales, of_indices = keys
    indices, lengths, pieces, tokens, own, queries, cached, offset, CAUSAL, LATE = where
    group, on_line, turns, piece, payload, width = taken_by(pieces)
    column = gl.arange(0, BOX, gl.SliceLayout(0, LOADED))
    of_groups = gl.arange(0, GROUPS, gl.SliceLayout(0, EACH)) * of_scales[2]
    loaded = 0
    for _ in range(turns):
        count, begin, end = keys_of(lengths, group, on_line, piece, payload, tokens)
        b = (group // queries).to(gl.int64)
        query = group % queries
        entries = indices + b * of_indices[0] + query.to(gl.int64) * of_indices[1]
        limit = cached  # names from here on are not attended to
        if CAUSAL:
            limit = gl.minimum(limit, query + offset + 1)
        upcoming = names_of(entries, of_indices[2], begin, end, gl.SliceLayout(1, LOADED))
        upcoming_scaled = names_of(entries, of_indices[2], begin, end, gl.SliceLayout(1, EACH))
        for start in range(begin, end, TILE):
            name = upcoming
            scaled = upcoming_scaled
            upcoming = names_of(entries, of_indices[2], start + TILE, end, gl.SliceLayout(1, LOADED))
            upcoming_scaled = names_of(entries, of_indices[2], start + TILE, end, gl.SliceLayout(1, EACH))
            is_key = (scaled >= 0) & (scaled < limit)
            of_keys = b * of_scales[0] + scaled.to(gl.int64) * of_scales[1]
            scale_of = gl.load(scales + (of_keys[:, None] + of_groups[None, :]), mask=is_key[:, None], other=0.0)
            buffer = loaded % BUFFERS
            mbarrier.wait(barriers.index(FREE + buffer), 1 ^ (loaded // BUFFERS & 1))
            full = barriers.index(FULL + buffer)
            there = ((name >= 0) & (name < limit))[:, None]
            # Strides in units of 8 numbers: the compiler copies as many at a time as it knows to be aligned.
            row = words_of_rows + ((b * of_rows[0] + name.to(gl.int64) * of_rows[1]) * 8)[:, None]
            for box in gl.static_range(BOXES):
                copy_rows(words.index(buffer * BOXES + box), row + (box * BOX + column)[None, :], mask=there)
            row = rope_keys + ((b * of_rows[2] + name.to(gl.int64) * of_rows[3]) * 8)[:, None]
            copy_rows(ropes.index(buffer), row + column[None, :], mask=there)
            copies_arrive(full, increment_count=False)
            place_ratios(scale_of, gl.where(is_key, 0.0, -float("inf")), memories, buffer, full, GROUPS)
            loaded += 1
        on_line += gl.where(width > 0, width, gl.cdiv(count, TILE)) + own
        group += 1
    if not LATE:
        gdc_launch_dependents()  # of `combine`: the last keys are on their way
