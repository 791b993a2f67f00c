"""How programs of attention write: the sums over a part of the keys, or the result of all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_part(
    acc,
    m_out,
    total_out,
    first_row,
    row,
    acc_a,
    acc_b,
    m,
    total,
    exists,
    L: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Store the sums of a part as they are, for `combine`."""
    tl.store(m_out + first_row + row, m, mask=exists)
    tl.store(total_out + first_row + row, total, mask=exists)
    store_columns(acc + first_row * L, row * L, acc_a, exists, 0, L, A)
    if B:
        store_columns(acc + first_row * L, row * L, acc_b, exists, A, L, B)


@triton.jit
def store_result(
    o,
    lse,
    first_row,
    row,
    acc_a,
    acc_b,
    m,
    total,
    exists,
    L: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Store the result of the sums over all keys."""
    # The greatest score adds exp(0) = 1 to total, so that it is below 1 only in a row that saw no key.
    share = 1.0 / tl.maximum(total, 1.0)
    tl.store(lse + first_row + row, m + tl.log(total), mask=exists)
    store_columns(o + first_row * L, row * L, acc_a * share[:, None], exists, 0, L, A)
    if B:
        store_columns(o + first_row * L, row * L, acc_b * share[:, None], exists, A, L, B)


@triton.jit
def store_columns(base, offsets, values, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store BLOCK columns from FIRST on, as far as WIDTH, of the rows at these offsets."""
    columns = FIRST + tl.arange(0, BLOCK)
    mask = exists[:, None]
    if FIRST + BLOCK > WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(base + (offsets[:, None] + columns[None, :]), values.to(base.dtype.element_ty), mask=mask)
