"""Which keys a program takes.

Where the host knows how many there are, as of a dense cache, each group's keys are cut in as many parts as `parts`
says. So they are, at fixed places, where a sequence's result may not depend on its batch. Where lengths are on the
device, as of pages, all tiles of keys of all sequences are shared out: laid end to end on a line, each sequence
followed by `own` tiles of room for what a program does for it besides its keys, the line is cut in pieces of `payload`
tiles, one for each program. A piece may hold the end of a sequence, several whole ones and the beginning of another,
and takes no longer than `payload + own`. What is cut, `combine` puts together:

    line      |-- 0 --|own|------ 1 ------|own|2|own|--- 3 ---|own|
    programs  |      0      |      1      |      2      |      3      |
    slots                 2 * 0 + 1 | 2 * 1     2 * 2 + 1 | 2 * 3

The beginning of a sequence that another program goes on with is in the odd slot of its program, what goes on in the
even. Where no sequence is longer than a payload, and there are no more of them than programs, each has a program of its
own: nothing is cut then, and it takes no longer.

Each program finds its piece from the lengths by itself, so that no launch more is needed to share them out.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(1024)
"""Lengths that are looked at at a time."""


@triton.jit
def part_size(keys, parts, fixed, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """How many keys a program takes: `fixed` if that is not 0, else an equal share, at least LEAST tiles."""
    share = tl.cdiv(tl.cdiv(keys, parts), KEYS) * KEYS
    return tl.where(fixed > 0, fixed, tl.maximum(share, LEAST * KEYS))


@triton.jit
def key_count(
    lengths,
    starts,
    group,
    queries,
    tokens,
    causal_offset,
    SOURCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
):
    """How many keys of a group, or names of keys, there are to look at."""
    count = tokens
    if SOURCE == "pages":
        count = tl.minimum(tl.load(lengths + group).to(tl.int32), tokens)
        if CAUSAL and STARTS:
            count = tl.maximum(tl.minimum(count, tl.load(starts + group).to(tl.int32) + queries), 0)
    elif SOURCE == "rows" and CAUSAL:
        count = tl.maximum(tl.minimum(tokens, queries + causal_offset), 0)
    return count


@triton.jit
def place_on_line(
    lengths,
    starts,
    batch,
    queries,
    tokens,
    parts,
    own,
    index,
    of_sequence,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """The line that is cut in `parts` pieces, and where piece `index`, or with `of_sequence` the sequence, begins.

    Gives what a piece takes; the tiles that every sequence takes on the line if each has a program of its own, or else
    0; and of the sequences that begin before the piece, or up to the sequence: how many, where the last begins, where
    its keys end and where the next begins; and how many begin before the end of the piece.
    """
    total = batch * own
    longest = batch * 0
    for first in range(0, batch, CHUNK):
        b = first + tl.arange(0, CHUNK)
        keys = key_count(lengths, starts, tl.minimum(b, batch - 1), queries, tokens, 0, "pages", CAUSAL, STARTS)
        tiles = tl.where(b < batch, tl.cdiv(keys, KEYS), 0)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    payload = tl.maximum(tl.cdiv(total, parts), LEAST)
    alone = (batch <= parts) & (longest <= payload)
    payload = tl.where(alone, longest + own, payload)
    width = tl.where(alone, longest, 0)

    before = tl.where(of_sequence, 2147483647, index * payload)
    until = tl.where(of_sequence, index + 1, batch)
    count = batch * 0
    begin, end, following, behind, passed = count, count, count, count, count
    for first in range(0, batch, CHUNK):
        b = first + tl.arange(0, CHUNK)
        keys = key_count(lengths, starts, tl.minimum(b, batch - 1), queries, tokens, 0, "pages", CAUSAL, STARTS)
        tiles = tl.where(b < batch, tl.cdiv(keys, KEYS), 0)
        room = tl.where(b < batch, tl.where(width > 0, width, tiles) + own, 0)
        place = passed + tl.cumsum(room, 0) - room
        counts = (b < until) & (place < before)
        count += tl.sum(counts.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(counts, place, 0), 0))
        end = tl.maximum(end, tl.max(tl.where(counts, place + tiles, 0), 0))
        following = tl.maximum(following, tl.max(tl.where(counts, place + room, 0), 0))
        behind += tl.sum(((b < batch) & (place < (index + 1) * payload)).to(tl.int32), 0)
        passed += tl.sum(room, 0)
    return payload, width, count, begin, end, following, behind
