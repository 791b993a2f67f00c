"""What a program of the kernels in Gluon takes, in tiles of 64 keys, and where these are.

pieces     [parts, 8] int32, written by `share_out`
latents, ropes     descriptors of pages [pages, page_size, columns], boxes [1, 64, columns that are loaded at a time]

The last tile of a sequence is loaded from so many rows before its first key on that its box ends with its last: nothing
is loaded of what lies behind, which may be NaN, and 0 times NaN is NaN. What the box has before the page is 0, by the
copy engine; rows of the same page before the tile's first key have been taken, and are hidden like those.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents

from .._common.pieces import cut_in_pieces, key_count, measured, passed_by

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""The copy's name from Triton 3.7 on, or up to 3.6."""
TILE = gl.constexpr(64)
"""Keys of a tile."""
ANY_VALUE = ("scale", "queries", "heads", "tokens", "own", "table_stride_0")
"""Arguments for whose values kernels over pages are not compiled anew."""
RECORD = tl.constexpr(8)
"""Numbers of a program in `pieces`."""


@triton.jit(do_not_specialize=("queries", "tokens", "batch", "parts", "own"))
def share_out(
    pieces, lengths, queries, tokens, batch, parts, own, LEAST: tl.constexpr, SIZE: tl.constexpr, LENGTHS: tl.constexpr
):
    """Store what each program takes: the first sequence, its place on the line, and the number of sequences; the place
    and the size of the piece; and the tiles that each sequence is given on the line, if all are given as many."""
    gdc_launch_dependents()
    part = tl.program_id(0)
    on_all, longest = batch * 0, batch * 0
    for at in range(0, batch, LENGTHS):
        b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
        keys = key_count(tl.load(lengths + b), 0, queries, tokens, 0, "pages", False, False)
        on_all, longest = measured(on_all, longest, keys, at, batch, SIZE, LENGTHS)
    payload, width = cut_in_pieces(on_all, longest, batch, parts, own, LEAST)
    group, on_line, end_before = batch * 0, batch * 0, batch * 0
    following, behind, passed = batch * 0, batch * 0, batch * 0
    for at in range(0, batch, LENGTHS):
        b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
        keys = key_count(tl.load(lengths + b), 0, queries, tokens, 0, "pages", False, False)
        group, on_line, end_before, following, behind, passed = passed_by(
            *(group, on_line, end_before, following, behind, passed),
            *(keys, at, batch, own, payload, width, part, False, SIZE, LENGTHS),
        )
    goes_on = end_before > part * payload
    group -= goes_on.to(tl.int32)
    record = pieces + part * RECORD
    tl.store(record, group)
    tl.store(record + 1, tl.where(goes_on, on_line, following))
    tl.store(record + 2, behind - group)
    tl.store(record + 3, part * payload)
    tl.store(record + 4, payload)
    tl.store(record + 5, width)


@gluon.jit
def taken_by(pieces):
    """Load what `share_out` stored for a program."""
    group = gl.load(pieces)
    on_line = gl.load(pieces + 1)
    turns = gl.load(pieces + 2)
    piece = gl.load(pieces + 3)
    payload = gl.load(pieces + 4)
    return group, on_line, turns, piece, payload, gl.load(pieces + 5)


@gluon.jit
def keys_of(lengths, group, on_line, piece, payload, tokens):
    """The number of keys of a sequence, and the first and one more than the last key that the program takes."""
    count = gl.minimum(gl.load(lengths + group).to(gl.int32), tokens)
    begin = gl.maximum(piece - on_line, 0) * TILE
    end = gl.minimum((piece + payload - on_line) * TILE, count)
    return count, begin, end


@gluon.jit
def rows_before(start, end):
    """How many rows the box of the tile of keys from `start` on begins before its first key."""
    return gl.maximum(start + TILE - end, 0)


@gluon.jit
def box_of(entries, stride, start, end, page_tiles):
    """The page of the tile of keys from `start` on, and the row of it with which the box begins.

    From `end` on nothing is read of the table, and all rows of the box lie before a page.
    """
    tile = start // TILE
    page = gl.load(entries + (tile // page_tiles).to(gl.int64) * stride, mask=start < end, other=0).to(gl.int32)
    return page, gl.where(start < end, tile % page_tiles * TILE - rows_before(start, end), -TILE)


@gluon.jit
def load_box(of_pages, page, row, column, full, box):
    """Load a box `[64, columns]` to shared memory: the rows of a page from `row` on."""
    copy(of_pages, [page, row, column], full, box.reshape([1, TILE, box.shape[1]]))
