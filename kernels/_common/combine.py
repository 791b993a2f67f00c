"""One result out of what the parts of a group's keys gave.

    acc [parts, groups, rows, L], m and total [parts, groups, rows]   float32
    o [groups, rows, L], lse [groups, rows]

A program takes one row. It knows from the group's length which parts there are, and sums them in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import LOG2E, LOWEST
from .kernel import key_count, part_size


@triton.jit(do_not_specialize=("queries", "heads", "tokens", "causal_offset", "parts", "fixed"))
def combine(
    acc,
    m_in,
    total_in,
    lengths,
    starts,
    o,
    lse,
    queries,
    heads,
    tokens,
    causal_offset,
    parts,
    fixed,
    SOURCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
):
    rows = heads if SOURCE == "named" else queries * heads
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    count = key_count(lengths, starts, group, queries, tokens, causal_offset, SOURCE, CAUSAL, STARTS)
    used = tl.cdiv(count, part_size(count, parts, fixed, KEYS, LEAST))

    columns = tl.arange(0, BLOCK)
    exists = columns < L
    m = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([BLOCK], tl.float32)
    rows_of_all = tl.num_programs(0) + tl.full([], 0, tl.int64)
    for part in tl.range(0, used):
        place = row + part * rows_of_all
        m_part = tl.load(m_in + place)
        m_new = tl.maximum(m, m_part)
        decay = tl.exp2((m - m_new) * LOG2E)
        weight = tl.exp2((m_part - m_new) * LOG2E)
        total = total * decay + tl.load(total_in + place) * weight
        out = out * decay + tl.load(acc + place * L + columns, mask=exists, other=0.0) * weight
        m = m_new
    tl.store(lse + row, m + tl.log(total))
    tl.store(o + row * L + columns, (out / tl.maximum(total, 1.0)).to(o.dtype.element_ty), mask=exists)
