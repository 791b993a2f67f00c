"""The one kernel of attention over latents, whether they lie in rows, in pages, or are the keys that a query names.

A program takes a tile of rows (heads of queries) of one group, and one part of the group's keys. Where keys are shared
out (`pieces`), it takes a piece of the keys of all sequences instead, one sequence after the other. With pages and rows
a group is a sequence whose rows are all its queries and heads, so that a tile reads each key once for all of them. With
named keys a group is one query.

    q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]              any strides but 1 in the last dim
    latent, rope                                              row-major, their last stride 1
        rows and named  [B, T, L], [B, T, R]
        pages           [pages, page_size, L], [pages, page_size, R]
    table       pages [B, max_pages]; named [B, Sq, topk]     int32 or int64
    lengths     pages [B], tokens of each sequence
    starts      pages [B], the position of each sequence's first query if queries are not the last tokens
    tokens      pages max_pages * page_size; rows T; named topk
    cached      T
    mask        [B, N, Sq, T], any strides, 0 where it broadcasts
    results of groups in one part (WORK "whole"), and of sequences that are not cut where keys are shared out ("shared")
        o [B, Sq, N, L], lse [B, Sq, N]                       contiguous
    partial sums of groups in several parts ("parts"), and of sequences that are cut
        acc [slots, L], m and total [slots]                   float32, contiguous; see `combine`
        "parts"   slots [parts, groups, rows]
        "shared"  slots [2 * parts, rows], where parts is the number of pieces

Programs of one part are neighbours in the grid: tiles of rows that read the same keys run at the same time, and all but
the first find these keys in the second-level cache.

What the steps do is in `pieces` (which keys a program takes), `rows` and `keys` (those of a tile), `attend` and `words`
(scores and sums), and `store`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import LOWEST, add_keys, aligned, rows_at, scores_of_latents, scores_of_rope
from .blocks import load_blocks, load_rope, no_sums
from .keys import located, look_up, mask_ahead, under_mask
from .pieces import cut_in_pieces, key_count, keys_in_piece, measured, part_of, passed_by, taken_from
from .rows import last_seen, offsets_of_rows, rows_of_tile
from .store import place_of_sums, store_sums
from .words import add_words, load_queries, no_sums_of_words, scores_of_words, settled

EARLIER_TRITON = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
"""Triton before 3.9 hoists more out of loops, which then takes registers while the loop runs."""

# Numbers that change from call to call as sequences grow, and that decide nothing about wide loads: the kernel is not
# recompiled because one of them became 1 or a multiple of 16.
_ANY_VALUE = ("scale", "queries", "heads", "tokens", "cached", "causal_offset", "batch", "parts", "fixed", "own")
_ANY_VALUE += ("table_stride_0", "mask_stride_b", "mask_stride_n", "mask_stride_s")


@triton.jit(do_not_specialize=_ANY_VALUE)
def attend_latents(
    q_latent,
    q_rope,
    latent,
    rope,
    scales,
    table,
    lengths,
    starts,
    mask,
    o,
    lse,
    acc,
    m_out,
    total_out,
    scale,
    queries,
    heads,
    tokens,
    cached,
    causal_offset,
    batch,
    parts,
    fixed,
    own,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    qr_stride_b,
    qr_stride_s,
    qr_stride_n,
    latent_stride_0,
    latent_stride_1,
    rope_stride_0,
    rope_stride_1,
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    table_stride_0,
    table_stride_1,
    table_stride_2,
    mask_stride_b,
    mask_stride_n,
    mask_stride_s,
    mask_stride_t,
    SOURCE: tl.constexpr,
    MASK: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    WORK: tl.constexpr,
    WHOLE: tl.constexpr,
    PAGE: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROPE: tl.constexpr,
    LEAST: tl.constexpr,
    CODED: tl.constexpr,
    CODED_ROPE: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    SAME_A: tl.constexpr,
    SAME_B: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    scale = tl.full([], scale, tl.float32)  # Inductor passes float64, to which all scores would be promoted
    # Inductor passes int64 where it knows no upper bound: what a loop updates would change its type in the loop.
    queries, tokens = tl.full([], queries, tl.int32), tl.full([], tokens, tl.int32)
    rows = heads if SOURCE == "named" else queries * heads
    tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    tile = program % tiles
    part = program // tiles % parts
    group = program // tiles // parts

    RUN: tl.constexpr = SOURCE == "rows" or (SOURCE == "pages" and PAGE % KEYS == 0)
    AHEAD: tl.constexpr = MASK == "bool" and not BY_ROW
    rope_stride_0 = aligned(rope_stride_0, ROPE_ALIGN)
    rope_stride_1 = aligned(rope_stride_1, ROPE_ALIGN)

    # What the program takes: a piece of all keys, one sequence a turn, or a part of one group's. Lengths are not loaded
    # by functions (see `pieces`).
    turns = 1
    if WORK == "shared":
        on_all, longest = batch * 0, batch * 0
        for at in range(0, batch, LENGTHS):
            b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
            start_of = tl.load(starts + b) if CAUSAL and STARTS else 0
            keys = key_count(tl.load(lengths + b), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            on_all, longest = measured(on_all, longest, keys, at, batch, KEYS, LENGTHS)
        payload, width = cut_in_pieces(on_all, longest, batch, parts, own, LEAST)
        group, on_line, end_before = batch * 0, batch * 0, batch * 0
        following, behind, passed = batch * 0, batch * 0, batch * 0
        for at in range(0, batch, LENGTHS):
            b = tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)
            start_of = tl.load(starts + b) if CAUSAL and STARTS else 0
            keys = key_count(tl.load(lengths + b), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            group, on_line, end_before, following, behind, passed = passed_by(
                *(group, on_line, end_before, following, behind, passed),
                *(keys, at, batch, own, payload, width, part, False, KEYS, LENGTHS),
            )
        group, on_line, turns = taken_from(part * payload, group, on_line, end_before, following, behind)
    else:
        count = key_count(
            tl.load(lengths + group) if SOURCE == "pages" else 0,
            tl.load(starts + group) if SOURCE == "pages" and CAUSAL and STARTS else 0,
            *(queries, tokens, causal_offset, SOURCE, CAUSAL, STARTS),
        )
        begin, end = part_of(count, part, parts, fixed, KEYS, LEAST)
        if WORK == "parts":  # noqa: SIM102  one is known when compiling, the other when running
            # `combine` does not read the sums of an empty part.
            if begin >= end:
                return
        if CAUSAL and SOURCE == "rows":
            # A tile of early queries can skip the keys that only later queries see.
            end = tl.minimum(end, (tile * ROWS + ROWS - 1) // heads + causal_offset + 1)

    # What a sequence needs before and after its loop over keys is recomputed in each turn. Hoisted, it would take
    # registers during that loop.
    for turn in tl.range(0, turns, disable_licm=True):
        # Always 0. LLVM knows that, Triton does not: before 3.9 it would hoist whatever does not depend on the turn.
        nothing = tl.minimum(turn, 0)
        # The rows of this turn, the keys that they see, and where their sums go.
        exists, b, query, head = rows_of_tile(tile + nothing, group, rows, queries, heads, SOURCE, WHOLE, ROWS)
        if WORK == "shared":
            start_of = tl.load(starts + group) if CAUSAL and STARTS else 0
            count = key_count(tl.load(lengths + group), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            begin, end = keys_in_piece(count, on_line, payload, KEYS)
        cache = cached if SOURCE == "named" else count
        last = last_seen(query, group, starts, cache, queries, causal_offset, SOURCE, CAUSAL, STARTS)
        first_row, cut = place_of_sums(group, tile, part, begin, end, count, rows, tiles, parts, WORK, ROWS)

        # The queries, and a state without keys.
        m = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        q_rows = offsets_of_rows(b, query, head, q_stride_b, q_stride_s, q_stride_n)
        if WORDS:
            q, undo = load_queries(q_latent, q_rows, exists, WORDS, GROUP)
            sums = no_sums_of_words(ROWS, WORDS, GROUP)
        else:
            q = load_blocks(q_latent, q_rows, exists, L, A, B)  # [ROWS, A], [ROWS, B]
            sums = no_sums(ROWS, A, B)
        qr_rows = offsets_of_rows(b, query, head, qr_stride_b, qr_stride_s, qr_stride_n)
        q_r = load_rope(q_rope, qr_rows, exists, q[0], R, ROPE)  # [ROWS, ROPE]

        # The table is read a tile ahead, so that loads of keys do not wait for their addresses.
        entries = table + b * table_stride_0
        stride = table_stride_1
        limit = cached  # names from here on are not attended to
        if SOURCE == "named":
            entries += (group % queries).to(tl.int64) * table_stride_1
            stride = table_stride_2
            if CAUSAL:
                limit = tl.minimum(cached, group % queries + causal_offset + 1)
        upcoming = look_up(entries, stride, begin, end, SOURCE, RUN, PAGE, KEYS)
        of_sequence = mask + b * mask_stride_b
        upcoming, upcoming_mask, further = mask_ahead(
            *(upcoming, begin, end, limit, entries, stride, of_sequence, mask_stride_t),
            *(SOURCE, AHEAD, RUN, PAGE, KEYS),
        )

        # With 64 rows on Hopper, registers do not suffice for what would be hoisted: it would go to the stack.
        STAYS: tl.constexpr = EARLIER_TRITON and WORK == "shared" and ROWS >= 64
        # At least one tile, even if none of its keys is seen: if the loop might not run, the compiler would wait for
        # each product.
        for i in tl.range(0, tl.maximum(tl.cdiv(end - begin, KEYS), 1), num_stages=STAGES, disable_licm=STAYS):
            # Read what is said of the next tile's keys, and locate this one's. What needs no table comes first: behind
            # these loads it would take more registers.
            start = begin + i * KEYS
            place = start + tl.arange(0, KEYS)  # [KEYS]
            start_64 = start + tl.full([], 0, tl.int64)
            seen = place < end
            found, bias = upcoming.to(tl.int64), upcoming_mask
            if AHEAD and SOURCE == "named":
                upcoming = further
            else:
                upcoming = look_up(entries, stride, start + KEYS, end, SOURCE, RUN, PAGE, KEYS)
            upcoming, upcoming_mask, further = mask_ahead(
                *(upcoming, start + KEYS, end, limit, entries, stride, of_sequence, mask_stride_t),
                *(SOURCE, AHEAD, RUN, PAGE, KEYS),
            )
            first, second, position, seen = located(
                *(found, bias, start_64, place, seen, limit, b),
                *(SOURCE, AHEAD, RUN, PAGE, table.dtype.element_ty == tl.int64),
            )
            # Which of them each row may see `[ROWS, KEYS]`, and which any row sees.
            bias, allowed, seen = under_mask(
                *(bias, of_sequence, mask_stride_n, mask_stride_s, mask_stride_t),
                *(query, head, position, seen, last, exists, MASK, BY_ROW),
            )

            # Scores, and the latents, which are values too. Scales are loaded only where there are codes.
            key_scales, scale_offsets = rows_at(
                scales, first, second, scale_stride_0, scale_stride_1, nothing, RUN, KEYS
            )
            if WORDS:
                pairs, offsets = rows_at(
                    *(latent.to(tl.pointer_type(tl.int16)), first, second),
                    *(latent_stride_0 // 2, latent_stride_1 // 2, nothing, RUN, KEYS),
                )
                scores, words, word_scales = scores_of_words(
                    *(q, pairs, offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(WORDS, GROUP, latent.dtype.element_ty == tl.int8, NATIVE),
                )
                scores = scores * (undo * scale)[:, None]
            else:
                latents, offsets = rows_at(latent, first, second, latent_stride_0, latent_stride_1, nothing, RUN, KEYS)
                scores, latent_a, latent_b = scores_of_latents(
                    *(q[0], q[1], latents, offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(scale, L, A, B, CODED, NATIVE, GROUP, SAME_A, SAME_B),
                )
            if R:
                ropes, rope_offsets = rows_at(rope, first, second, rope_stride_0, rope_stride_1, nothing, RUN, KEYS)
                scores += scores_of_rope(
                    *(q_r, ropes, rope_offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(scale, R, ROPE, CODED_ROPE, NATIVE),
                )
            if MASK == "bias":
                scores += bias.to(tl.float32)
            # Always true. LLVM knows that, Triton does not. If Triton saw that one product feeds another, it would have
            # both warp groups of a Hopper program compute all scores of 64 rows; the `if` hides it.
            if tl.num_programs(0) > 0:
                scores = tl.where(allowed, scores, -float("inf"))  # [ROWS, KEYS]
            # The sums so far.
            if WORDS:
                m, total, sums = add_words(
                    *(m, total, sums, scores, words, word_scales),
                    *(WORDS, latent.dtype.element_ty == tl.int8, NATIVE),
                )
            else:
                m, total, sums_a, sums_b = add_keys(m, total, sums[0], sums[1], scores, latent_a, latent_b, B)
                sums = (sums_a, sums_b)

        first_row = first_row.to(tl.int64)
        if WORDS:
            m, total, sums = settled(m, total, sums, WORDS)
        elif not B:
            sums = (sums[0],)
        store_sums(o, lse, acc, m_out, total_out, first_row, sums, m, total, exists, cut, WORK, L)
        if WORK == "shared":
            on_line += tl.where(width > 0, width, tl.cdiv(count, KEYS)) + own
            group += 1
