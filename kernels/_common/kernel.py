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
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import LOWEST, add_keys, aligned, load_latents, load_mask, rows_at, scores_of_latents
from .blocks import load_blocks, load_rope, no_sums
from .pieces import cut_in_pieces, key_count, measured, part_size, passed_by
from .store import store_part, store_result
from .words import add_words, load_queries, no_sums_of_words, scores_of_words, settled

EARLIER_TRITON = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
"""Triton before 3.9 hoists more out of loops, which then takes registers while the loop runs."""


@triton.jit
def look_up(
    entries, stride, start, end, SOURCE: tl.constexpr, RUN: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Read the table for a tile of keys: one page for all, or the page or name of each. Reads none from `end` on."""
    if SOURCE == "rows":
        found = tl.zeros([], tl.int32)
    elif RUN:
        found = tl.load(entries + (start // PAGE).to(tl.int64) * stride, mask=start < end, other=0)
    else:
        place = start + tl.arange(0, KEYS)
        index = place if SOURCE == "named" else place // PAGE
        found = tl.load(entries + index.to(tl.int64) * stride, mask=place < end, other=-1 if SOURCE == "named" else 0)
    return found


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

    # Whether the keys of a tile are adjacent: their address is then a scalar plus offsets that all tiles share.
    RUN: tl.constexpr = SOURCE == "rows" or (SOURCE == "pages" and PAGE % KEYS == 0)
    rope_stride_0 = aligned(rope_stride_0, ROPE_ALIGN)
    rope_stride_1 = aligned(rope_stride_1, ROPE_ALIGN)

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
        piece = part * payload
        if end_before > piece:  # the last sequence that began before this piece continues in it
            group -= 1
        else:
            on_line = following
        on_line -= piece  # relative to the beginning of the piece
        turns = behind - group
    else:
        count = key_count(
            tl.load(lengths + group) if SOURCE == "pages" else 0,
            tl.load(starts + group) if SOURCE == "pages" and CAUSAL and STARTS else 0,
            *(queries, tokens, causal_offset, SOURCE, CAUSAL, STARTS),
        )
        size = part_size(count, parts, fixed, KEYS, LEAST)
        begin = part * size
        end = tl.minimum(begin + size, count)
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
        row = (tile + nothing) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        exists = row < rows
        if WHOLE:  # every tile is full, so that no row needs a mask
            exists = row >= 0
        if SOURCE == "named":
            b = (group // queries).to(tl.int64)
            query = row * 0 + group % queries
            head = row
        else:
            b = group.to(tl.int64)
            query = row // heads
            head = row % heads
        if WORK == "shared":
            start_of = tl.load(starts + group) if CAUSAL and STARTS else 0
            count = key_count(tl.load(lengths + group), start_of, queries, tokens, 0, SOURCE, CAUSAL, STARTS)
            begin = tl.maximum(-on_line, 0) * KEYS
            end = tl.minimum((payload - on_line) * KEYS, count)
        last = query * 0 + (cached if SOURCE == "named" else count) - 1  # the last key that each row may see
        if CAUSAL:
            if SOURCE != "pages":
                last = query + causal_offset
            elif STARTS:
                last = query + tl.load(starts + group).to(tl.int32)
            else:
                last = query + count - queries

        first_row = group * rows + tile * ROWS  # fits 32 bits: no memory holds the sums of 2^31 rows
        if WORK == "parts":
            first_row += part * (tl.num_programs(0) // tiles // parts * rows)
        if WORK == "shared":
            cut = (begin > 0) | (end < count)
            slot = 2 * part + (begin == 0).to(tl.int32)
            first_row = tl.where(cut, slot * rows + tile * ROWS, first_row)

        q_rows = b * q_stride_b + query.to(tl.int64) * q_stride_s + head.to(tl.int64) * q_stride_n
        if WORDS:
            q_words, undo = load_queries(q_latent, q_rows, exists, WORDS, GROUP)
            q_a = q_words[0]
        else:
            q_a, q_b = load_blocks(q_latent, q_rows, exists, L, A, B)  # [ROWS, A], [ROWS, B]
        qr_rows = b * qr_stride_b + query.to(tl.int64) * qr_stride_s + head.to(tl.int64) * qr_stride_n
        q_r = load_rope(q_rope, qr_rows, exists, q_a, R, ROPE)  # [ROWS, ROPE]
        dtype: tl.constexpr = q_latent.dtype.element_ty
        m = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if WORDS:
            sums = no_sums_of_words(ROWS, WORDS, GROUP)
        else:
            acc_a, acc_b = no_sums(ROWS, A, B)

        entries = table + b * table_stride_0
        stride = table_stride_1
        if SOURCE == "named":
            entries += (group % queries).to(tl.int64) * table_stride_1
            stride = table_stride_2
        limit = cached  # names from here on are not attended to
        if CAUSAL and SOURCE == "named":
            limit = tl.minimum(cached, group % queries + causal_offset + 1)
        # The table is read a tile ahead, so that loads of keys do not wait for their addresses.
        upcoming = look_up(entries, stride, begin, end, SOURCE, RUN, PAGE, KEYS)
        # A boolean mask is read a tile ahead too. It decides which keys are loaded, and asynchronous copies to shared
        # memory cannot take single bytes. Names are then read two tiles ahead, since they say where to read the mask.
        AHEAD: tl.constexpr = MASK == "bool" and not BY_ROW
        of_sequence = mask + b * mask_stride_b
        upcoming_bias = upcoming
        further = upcoming
        if AHEAD:
            if SOURCE == "named":
                upcoming = tl.where(upcoming < limit, upcoming, -1)
                further = look_up(entries, stride, begin + KEYS, end, SOURCE, RUN, PAGE, KEYS)
            upcoming_bias = load_mask(of_sequence, mask_stride_t, upcoming, begin, end, SOURCE, KEYS)

        # With 64 rows on Hopper, registers do not suffice for what would be hoisted: it would go to the stack.
        STAYS: tl.constexpr = EARLIER_TRITON and WORK == "shared" and ROWS >= 64
        # At least one tile, even if none of its keys is seen: if the loop might not run, the compiler would wait for
        # each product.
        for i in tl.range(0, tl.maximum(tl.cdiv(end - begin, KEYS), 1), num_stages=STAGES, disable_licm=STAYS):
            start = begin + i * KEYS
            place = start + tl.arange(0, KEYS)  # [KEYS]
            start_64 = start + tl.full([], 0, tl.int64)
            seen = place < end
            found = upcoming.to(tl.int64)
            bias = upcoming_bias
            if AHEAD and SOURCE == "named":
                # Compared here, since keys are only prefetched if no value is carried over two iterations unchanged.
                upcoming = tl.where(further < limit, further, -1)
                further = look_up(entries, stride, start + 2 * KEYS, end, SOURCE, RUN, PAGE, KEYS)
            else:
                upcoming = look_up(entries, stride, start + KEYS, end, SOURCE, RUN, PAGE, KEYS)
            if AHEAD:
                upcoming_bias = load_mask(of_sequence, mask_stride_t, upcoming, start + KEYS, end, SOURCE, KEYS)
                seen = bias != 0
            # Locate the keys: first and second index into the cache.
            position = place
            if SOURCE == "pages":
                first = found
                second = start_64 % PAGE if RUN else place % PAGE
            elif SOURCE == "rows":
                first = b
                second = start_64
            else:
                if not AHEAD:
                    seen = (found >= 0) & (found < limit)
                # Where no key is seen any position will do, as nothing is loaded. Triton 3.6 and 3.7 fail at
                # `where(seen, ...)` if names are int64, or if `seen` comes from the previous iteration's mask.
                WIDE: tl.constexpr = table.dtype.element_ty == tl.int64
                position = (tl.maximum(found, 0) if AHEAD else found if WIDE else tl.where(seen, found, 0)).to(tl.int32)
                first = b
                second = position
            of_keys = of_sequence + position.to(tl.int64) * mask_stride_t
            if MASK == "bias" and not BY_ROW:
                bias = tl.load(of_keys, mask=seen, other=0)[None, :]
            allowed = seen[None, :] & (position[None, :] <= last[:, None])
            if MASK != "none" and BY_ROW:
                of_rows = head.to(tl.int64) * mask_stride_n + query.to(tl.int64) * mask_stride_s
                bias = tl.load(of_keys[None, :] + of_rows[:, None], mask=allowed & exists[:, None], other=0)
                if MASK == "bool":
                    allowed = allowed & (bias != 0)
                    # Keys that no row sees may hold anything, and 0 times NaN is NaN: they are not loaded.
                    seen = tl.max(allowed.to(tl.int32), 0) > 0

            key_scales, scale_offsets = latent, seen
            if CODED or CODED_ROPE:
                key_scales, scale_offsets = rows_at(
                    scales, first, second, scale_stride_0, scale_stride_1, nothing, RUN, KEYS
                )
            if WORDS:
                pairs, offsets = rows_at(
                    *(latent.to(tl.pointer_type(tl.int16)), first, second),
                    *(latent_stride_0 // 2, latent_stride_1 // 2, nothing, RUN, KEYS),
                )
                scores, words, word_scales = scores_of_words(
                    *(q_words, pairs, offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(WORDS, GROUP, latent.dtype.element_ty == tl.int8, NATIVE),
                )
                scores = scores * (undo * scale)[:, None]
            else:
                latents, offsets = rows_at(latent, first, second, latent_stride_0, latent_stride_1, nothing, RUN, KEYS)
                scores, latent_a, latent_b = scores_of_latents(
                    *(q_a, q_b, latents, offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(scale, L, A, B, CODED, NATIVE, GROUP, SAME_A, SAME_B),
                )
            if R:
                ropes, rope_offsets = rows_at(rope, first, second, rope_stride_0, rope_stride_1, nothing, RUN, KEYS)
                k_rope = load_latents(
                    *(ropes, rope_offsets, seen, key_scales, scale_offsets, scale_stride_2),
                    *(dtype, 0, R, ROPE, CODED_ROPE, NATIVE, R, ROPE),
                )  # [KEYS, ROPE]
                scores += tl.dot(q_r, tl.trans(k_rope), input_precision="ieee") * scale
            if MASK == "bias":
                scores += bias.to(tl.float32)
            # Always true. LLVM knows that, Triton does not. If Triton saw that one product feeds another, it would have
            # both warp groups of a Hopper program compute all scores of 64 rows; the `if` hides it.
            if tl.num_programs(0) > 0:
                scores = tl.where(allowed, scores, -float("inf"))  # [ROWS, KEYS]
            if WORDS:
                m, total, sums = add_words(
                    *(m, total, sums, scores, words, word_scales),
                    *(WORDS, latent.dtype.element_ty == tl.int8, NATIVE),
                )
            else:
                m, total, acc_a, acc_b = add_keys(m, total, acc_a, acc_b, scores, latent_a, latent_b, B)

        # A scalar address plus offsets that are constant in each thread: anything else that the stores need would take
        # registers throughout the loop.
        first_row = first_row.to(tl.int64)
        in_tile = tl.arange(0, ROWS)
        if WORDS:
            m, total, sums = settled(m, total, sums, WORDS)
        elif B:
            sums = (acc_a, acc_b)
        else:
            sums = (acc_a,)
        if WORK == "parts":
            store_part(acc, m_out, total_out, first_row, in_tile, sums, m, total, exists, L)
        elif WORK == "whole":
            store_result(o, lse, first_row, in_tile, sums, m, total, exists, L)
        elif cut:
            store_part(acc, m_out, total_out, first_row, in_tile, sums, m, total, exists, L)
        else:
            store_result(o, lse, first_row, in_tile, sums, m, total, exists, L)
        if WORK == "shared":
            on_line += tl.where(width > 0, width, tl.cdiv(count, KEYS)) + own
            group += 1
