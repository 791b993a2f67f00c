"""How programs of attention write, and where: the sums over a part of the keys, or the result of all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import store_tiles


@triton.jit
def place_of_sums(
    group,
    tile,
    part,
    begin,
    end,
    count,
    rows,
    tiles,
    parts,
    WORK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first row of a tile in what its sums are stored in, and whether other programs take keys of the group too.

    The keys are those from `begin` to `end`, of `count`. Rows fit 32 bits: no memory holds the sums of 2^31 rows.
    """
    first_row = group * rows + tile * ROWS
    if WORK == "parts":
        first_row += part * (tl.num_programs(0) // tiles // parts * rows)
    cut = (begin > 0) | (end < count)
    if WORK == "shared":
        slot = 2 * part + (begin == 0).to(tl.int32)
        first_row = tl.where(cut, slot * rows + tile * ROWS, first_row)
    return first_row, cut


@triton.jit
def store_sums(
    o,
    lse,
    acc,
    m_out,
    total_out,
    first_row,
    sums,
    m,
    total,
    exists,
    cut,
    WORK: tl.constexpr,
    L: tl.constexpr,
):
    """Store the sums of a tile of rows from `first_row` on, tiles side by side: as a part, or as the result.

    A scalar address plus offsets that are constant in each thread: anything else that the stores need would take
    registers throughout the loop over keys.
    """
    ROWS: tl.constexpr = m.shape[0]
    in_tile = tl.arange(0, ROWS)
    if WORK == "parts":
        store_part(acc, m_out, total_out, first_row, in_tile, sums, m, total, exists, L)
    elif WORK == "whole":
        store_result(o, lse, first_row, in_tile, sums, m, total, exists, L)
    elif cut:
        store_part(acc, m_out, total_out, first_row, in_tile, sums, m, total, exists, L)
    else:
        store_result(o, lse, first_row, in_tile, sums, m, total, exists, L)


@triton.jit
def store_part(
    acc,
    m_out,
    total_out,
    first_row,
    row,
    sums,
    m,
    total,
    exists,
    L: tl.constexpr,
):
    """Store the sums of a part, tiles side by side, as they are, for `combine`."""
    tl.store(m_out + first_row + row, m, mask=exists)
    tl.store(total_out + first_row + row, total, mask=exists)
    store_tiles(acc + first_row * L, row * L, sums, exists, L)


@triton.jit
def store_result(
    o,
    lse,
    first_row,
    row,
    sums,
    m,
    total,
    exists,
    L: tl.constexpr,
):
    """Store the result of the sums over all keys."""
    # The greatest score adds exp(0) = 1 to total, so that it is below 1 only in a row that saw no key.
    share = 1.0 / tl.maximum(total, 1.0)
    tl.store(lse + first_row + row, m + tl.log(total), mask=exists)
    shares = ()
    for i in tl.static_range(len(sums)):
        shares += (sums[i] * share[:, None],)
    store_tiles(o + first_row * L, row * L, shares, exists, L)
