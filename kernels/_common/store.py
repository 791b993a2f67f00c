"""How programs of attention write: the sums over a part of the keys, or the result of all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import store_tiles


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
