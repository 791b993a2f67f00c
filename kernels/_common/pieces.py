"""Which keys a program takes.

Where the host knows the number of keys, as for a dense cache, each group's keys are cut into as many parts as `parts`
says. Where a sequence's result may not depend on its batch, they are cut at fixed places. Where the lengths are on the
device, as for pages, the keys of all sequences are shared out. Their tiles are laid end to end on a line, each sequence
followed by `own` tiles of room for what a program does for it besides its keys, and the line is cut into pieces of
`payload` tiles, one per program. A piece may hold the end of a sequence, several whole ones and the beginning of
another, and takes no longer than `payload + own`. `combine` merges the parts of a sequence that is cut:

    line      |-- 0 --|own|------ 1 ------|own|2|own|--- 3 ---|own|
    programs  |      0      |      1      |      2      |      3      |
    slots                 2 * 0 + 1 | 2 * 1     2 * 2 + 1 | 2 * 3

The result for the beginning of a sequence that another program continues goes to the odd slot of its program, that for
a continuation to the even slot. Where no sequence is longer than a payload, and there are no more sequences than
programs, each has a program of its own: then nothing is cut, and it takes no longer.

Each program finds its piece from the lengths by itself, so that sharing out needs no additional launch. It reads them
LENGTHS at a time.

Kernels load the lengths and pass them to the functions here as values. To find what a kernel writes to, torch goes back
from its stores, and stops at loads. It does not look into a function whose result enters an address, and assumes that
the kernel writes through every pointer passed to such a function.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_size(keys, parts, fixed, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """How many keys a program takes: `fixed` if it is not 0, else an equal share of at least LEAST tiles."""
    share = tl.cdiv(tl.cdiv(keys, parts), KEYS) * KEYS
    return tl.where(fixed > 0, fixed, tl.maximum(share, LEAST * KEYS))


@triton.jit
def part_of(keys, part, parts, fixed, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """The first key of a part, and the first behind it."""
    size = part_size(keys, parts, fixed, KEYS, LEAST)
    begin = part * size
    return begin, tl.minimum(begin + size, keys)


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
    """How many keys, or names of keys, of a group there are to go through.

    For pages this depends on the sequence's length and, with STARTS, on the position of its first query.
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
def measured(total, longest, keys, first, batch, KEYS: tl.constexpr, LENGTHS: tl.constexpr):
    """Update the number of tiles of all sequences, and of the longest, with LENGTHS sequences from `first` on."""
    tiles = tl.where(first + tl.arange(0, LENGTHS) < batch, tl.cdiv(keys, KEYS), 0)
    return total + tl.sum(tiles, 0), tl.maximum(longest, tl.max(tiles, 0))


@triton.jit
def cut_in_pieces(total, longest, batch, parts, own, LEAST: tl.constexpr):
    """The size of a piece of the line, and if each sequence has a program of its own, the tiles that each is given on
    the line, else 0."""
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
    LENGTHS: tl.constexpr,
):
    """Find piece `index` on the line, or with `of_sequence` sequence `index`: go on by LENGTHS sequences from `first`.

    Updates, for the sequences that begin before the piece, or those up to the sequence: their number (`count`), where
    the last of them begins (`begin`), where its keys end (`end`) and where the next one begins (`following`). Also
    updates how many sequences begin before the end of the piece (`behind`), and the place on the line (`passed`).
    """
    before = tl.where(of_sequence, 2147483647, index * payload)
    until = tl.where(of_sequence, index + 1, batch)
    b = first + tl.arange(0, LENGTHS)
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


@triton.jit
def taken_from(piece, count, begin, end, following, behind):
    """What a program takes of the piece that begins at `piece`, from what `passed_by` found.

    Returns its first sequence, where that begins, counted from the beginning of the piece, and how many it takes.
    """
    if end > piece:  # the last sequence that began before this piece continues in it
        count -= 1
    else:
        begin = following
    return count, begin - piece, behind - count


@triton.jit
def keys_in_piece(keys, begin, payload, KEYS: tl.constexpr):
    """The first key in a piece of a sequence of so many `keys`, and the first behind it.

    The sequence begins at `begin`, counted from the beginning of the piece.
    """
    return tl.maximum(-begin, 0) * KEYS, tl.minimum((payload - begin) * KEYS, keys)
