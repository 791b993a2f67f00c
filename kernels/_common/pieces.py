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

Lengths are loaded by kernels and handed to the functions here. torch finds what a kernel writes to by going back from
its stores, and stops at loads; it does not look into a function of whose result an address is made, and takes what such
a function is given a pointer to for written to.
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
    length,
    start,
    queries,
    tokens,
    causal_offset,
    SOURCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
):
    """How many keys of a group, or names of keys, there are to look at.

    Of pages by the sequence's length, and with STARTS the position of its first query.
    """
    count = tokens
    if SOURCE == "pages":
        count = tl.minimum(length.to(tl.int32), tokens)
        if CAUSAL and STARTS:
            count = tl.maximum(tl.minimum(count, start.to(tl.int32) + queries), 0)
    elif SOURCE == "rows" and CAUSAL:
        count = tl.maximum(tl.minimum(tokens, queries + causal_offset), 0)
    return count


@triton.jit
def measured(total, longest, keys, first, batch, KEYS: tl.constexpr):
    """The tiles of all sequences and of the longest, with those of CHUNK more from `first` on."""
    tiles = tl.where(first + tl.arange(0, CHUNK) < batch, tl.cdiv(keys, KEYS), 0)
    return total + tl.sum(tiles, 0), tl.maximum(longest, tl.max(tiles, 0))


@triton.jit
def cut_in_pieces(total, longest, batch, parts, own, LEAST: tl.constexpr):
    """What a piece of the line takes; and the tiles of every sequence on it if each has a program of its own, or 0."""
    payload = tl.maximum(tl.cdiv(total + batch * own, parts), LEAST)
    alone = (batch <= parts) & (longest <= payload)
    payload = tl.where(alone, longest + own, payload)
    return payload, tl.where(alone, longest, 0)


@triton.jit
def passed_by(
    count,
    begin,
    end,
    following,
    behind,
    passed,
    keys,
    first,
    batch,
    own,
    payload,
    width,
    index,
    of_sequence,
    KEYS: tl.constexpr,
):
    """Where piece `index`, or with `of_sequence` the sequence, begins on the line, by CHUNK sequences from `first` on.

    Of the sequences that begin before the piece, or up to the sequence: how many, where the last begins, where its keys
    end and where the next begins; how many begin before the end of the piece; and where the line is by now.
    """
    before = tl.where(of_sequence, 2147483647, index * payload)
    until = tl.where(of_sequence, index + 1, batch)
    b = first + tl.arange(0, CHUNK)
    tiles = tl.where(b < batch, tl.cdiv(keys, KEYS), 0)
    room = tl.where(b < batch, tl.where(width > 0, width, tiles) + own, 0)
    place = passed + tl.cumsum(room, 0) - room
    counts = (b < until) & (place < before)
    count += tl.sum(counts.to(tl.int32), 0)
    begin = tl.maximum(begin, tl.max(tl.where(counts, place, 0), 0))
    end = tl.maximum(end, tl.max(tl.where(counts, place + tiles, 0), 0))
    following = tl.maximum(following, tl.max(tl.where(counts, place + room, 0), 0))
    behind += tl.sum(((b < batch) & (place < (index + 1) * payload)).to(tl.int32), 0)
    return count, begin, end, following, behind, passed + tl.sum(room, 0)
