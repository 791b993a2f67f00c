"""Merge two attentions over disjoint keys, a few rows per program.

o_a, o_b, o [rows, V], lse_a, lse_b, lse [rows]   contiguous
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.attend import LOG2E, LOWEST


@triton.jit(do_not_specialize=("rows",))
def merge(o_a, lse_a, o_b, lse_b, o, lse, rows, V: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    a = tl.load(lse_a + row, mask=exists, other=0.0)
    b = tl.load(lse_b + row, mask=exists, other=0.0)
    # The lowest finite number, not -inf: two empty sets then get exp(-inf), not NaN.
    m = tl.maximum(tl.maximum(a, b), LOWEST)
    weight_a = tl.exp2((a - m) * LOG2E)
    weight_b = tl.exp2((b - m) * LOG2E)
    total = weight_a + weight_b
    tl.store(lse + row, m + tl.log(total), mask=exists)
    column = tl.arange(0, BLOCK)
    place = row[:, None] * V + column[None, :]
    inside = exists[:, None] & (column < V)[None, :]
    values = tl.load(o_a + place, mask=inside, other=0.0).to(tl.float32) * weight_a[:, None]
    values += tl.load(o_b + place, mask=inside, other=0.0).to(tl.float32) * weight_b[:, None]
    # The greater weight is 1, so the total is below 1 only for two empty sets.
    values = values / tl.maximum(total, 1.0)[:, None]
    tl.store(o + place, values.to(o.dtype.element_ty), mask=inside)
