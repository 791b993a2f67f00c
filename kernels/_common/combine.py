"""Combine the partial results of the parts of a group's keys.

    acc [slots, L], m and total [slots]   float32; slots [parts, groups, rows]; for shared keys [2 * parts, rows]
    o [groups, rows, L], lse [groups, rows]

A program takes a few rows of a group and every SPREADth block of columns. It knows from the lengths which parts there
are, and merges PARTS of them at a time, whose loads do not wait for each other: a single sequence has as many parts as
the machine has multiprocessors. Where keys are shared out, there is a program for each sequence or, if cuts are fewer,
for each cut. A program whose sequence is not cut does nothing, because the result has already been written.

With FOLLOWS it may be launched before the kernel whose results it combines has ended, and waits for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import LOG2E, LOWEST
from .pieces import cut_in_pieces, key_count, measured, part_size, passed_by

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # a Triton for other GPUs alone
    gdc_wait = None

_ANY_VALUE = ("queries", "heads", "tokens", "causal_offset", "batch", "parts", "fixed", "own")


@triton.jit(do_not_specialize=_ANY_VALUE)
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
    batch,
    parts,
    fixed,
    own,
    SOURCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    SHARED: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    LENGTHS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    queries, tokens = tl.full([], queries, tl.int32), tl.full([], tokens, tl.int32)  # as in the kernel before
    rows = heads if SOURCE == "named" else queries * heads
    tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    row = program // SPREAD % tiles * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    group = program // SPREAD // tiles
    if SHARED:
        # By sequences where they are few, else by cuts, of which only the first one in a sequence counts.
        few = batch < parts
        index = tl.where(few, group, group + 1)
        on_all, longest = batch * 0, batch * 0
        for at in range(0, batch, LENGTHS):
            b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
            start_of = tl.load(starts + b) if CAUSAL and STARTS else 0
            keys = key_count(tl.load(lengths + b), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            on_all, longest = measured(on_all, longest, keys, at, batch, KEYS, LENGTHS)
        payload, width = cut_in_pieces(on_all, longest, batch, parts, own, LEAST)
        found, begin, end = batch * 0, batch * 0, batch * 0
        following, behind, passed = batch * 0, batch * 0, batch * 0
        for at in range(0, batch, LENGTHS):
            b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
            start_of = tl.load(starts + b) if CAUSAL and STARTS else 0
            keys = key_count(tl.load(lengths + b), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            found, begin, end, following, behind, passed = passed_by(
                *(found, begin, end, following, behind, passed),
                *(keys, at, batch, own, payload, width, index, few, KEYS, LENGTHS),
            )
        first = begin // payload
        used = (end - 1) // payload - first + 1
        if FOLLOWS:  # before any program ends: what comes next relies on the kernel before having ended too
            gdc_wait()
        if (end == begin) | (used < 2) | ((not few) & ((end <= (group + 1) * payload) | (first != group))):
            return
        group = found - 1
        slot = 2 * first * rows
        each = 2 * rows
        ahead = rows  # the beginning is in the odd slot
    else:
        count = key_count(
            tl.load(lengths + group) if SOURCE == "pages" else 0,
            tl.load(starts + group) if SOURCE == "pages" and CAUSAL and STARTS else 0,
            *(queries, tokens, causal_offset, SOURCE, CAUSAL, STARTS),
        )
        used = tl.cdiv(count, part_size(count, parts, fixed, KEYS, LEAST))
        slot = group * rows
        each = tl.num_programs(0) // SPREAD // tiles * rows
        ahead = 0

    row_of_all = group.to(tl.int64) * rows + row
    for block in tl.range(program % SPREAD, tl.cdiv(L, COLUMNS), SPREAD):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < L
        m = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_part in tl.range(0, used, PARTS):
            part = first_part + tl.arange(0, PARTS)
            # Rows come before parts: where there are several, each warp takes its own and sums parts by itself.
            places = (slot + part * each + tl.where(part == 0, ahead, 0))[None, :] + row[:, None]  # [ROWS, PARTS]
            there = (part < used)[None, :] & exists[:, None]
            greatest = tl.load(m_in + places, mask=there, other=LOWEST)
            totals = tl.load(total_in + places, mask=there, other=0.0)
            sums = acc + (places.to(tl.int64) * L)[:, :, None] + columns[None, None, :]
            values = tl.load(sums, mask=there[:, :, None] & inside[None, None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(greatest, 1))
            decay = tl.exp2((m - m_new) * LOG2E)
            weights = tl.exp2((greatest - m_new[:, None]) * LOG2E)
            total = total * decay + tl.sum(totals * weights, 1)
            out = out * decay[:, None] + tl.sum(values * weights[:, :, None], 1)
            m = m_new
        if block == 0:
            tl.store(lse + row_of_all, m + tl.log(total), mask=exists)
        out = out / tl.maximum(total, 1.0)[:, None]
        places_of_all = o + row_of_all[:, None] * L + columns[None, :]
        tl.store(places_of_all, out.to(o.dtype.element_ty), mask=exists[:, None] & inside[None, :])
