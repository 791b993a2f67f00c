"""The keys of a tile: read from a table ahead of time, located in the cache, and hidden by a mask.

    found     what the table says: for adjacent keys (RUN) their page, [], else the page or name of each key, [KEYS]
    mask      what a mask says: [KEYS], [1, KEYS] or [ROWS, KEYS]; any other tensor if there is no mask
    seen      which keys are loaded: [KEYS]

Keys are adjacent if they lie in rows, or in pages that hold whole tiles. Their address is then a scalar plus offsets
that all tiles share.

A boolean mask that is the same for all rows is read a tile ahead (AHEAD). It decides which keys are loaded, and
asynchronous copies to shared memory cannot take single bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def load_mask(of_sequence, stride, names, start, end, SOURCE: tl.constexpr, KEYS: tl.constexpr):
    """Load a mask that is the same for all rows for a tile of keys: 0 from `end` on, and for negative names."""
    place = start + tl.arange(0, KEYS)
    there = place < end
    if SOURCE == "named":
        place = names
        there = names >= 0
    return tl.load(of_sequence + place.to(tl.int64) * stride, mask=there, other=0)


@triton.jit
def mask_ahead(
    found,
    start,
    end,
    limit,
    entries,
    stride,
    of_sequence,
    mask_stride,
    SOURCE: tl.constexpr,
    AHEAD: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """With AHEAD, read the mask for the tile of keys from `start` on, of which the table says `found`: both.

    Names say where to read it. So they are read two tiles ahead, and those of the tile behind `start`'s are returned
    too. Names from `limit` on become -1.
    """
    mask = found
    further = found
    if AHEAD:
        if SOURCE == "named":
            # Compared here, since keys are only prefetched if no value is carried over two iterations unchanged.
            found = tl.where(found < limit, found, -1)
            further = look_up(entries, stride, start + KEYS, end, SOURCE, RUN, PAGE, KEYS)
        mask = load_mask(of_sequence, mask_stride, found, start, end, SOURCE, KEYS)
    return found, mask, further


@triton.jit
def located(
    found,
    mask,
    start,
    place,
    seen,
    limit,
    b,
    SOURCE: tl.constexpr,
    AHEAD: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Locate a tile of keys: the first and second index into the cache, the position `[KEYS]`, and which are seen.

    With RUN both indices are scalars, those of the first key. The tile begins at `start`; `place` and `seen` are the
    places of its keys among those of the group, or in the list of names, and which of them there are. `found` and
    `start` are int64; names were so in the table if WIDE.
    """
    if AHEAD:
        seen = mask != 0
    position = place
    first = b
    second = start
    if SOURCE == "pages":
        first = found
        second = start % PAGE if RUN else place % PAGE
    elif SOURCE == "named":
        if not AHEAD:
            seen = (found >= 0) & (found < limit)
        # Where no key is seen any position will do, as nothing is loaded. Triton 3.6 and 3.7 fail at `where(seen, ...)`
        # if names are int64, or if `seen` comes from the previous iteration's mask.
        position = (tl.maximum(found, 0) if AHEAD else found if WIDE else tl.where(seen, found, 0)).to(tl.int32)
        second = position
    return first, second, position, seen


@triton.jit
def under_mask(
    mask,
    of_sequence,
    stride_n,
    stride_s,
    stride_t,
    query,
    head,
    position,
    seen,
    last,
    exists,
    MASK: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """The mask's numbers for a tile, which keys each row may see `[ROWS, KEYS]`, and which of them any row sees.

    `mask` is what was read ahead, `of_sequence` the mask of the sequence, and `last` the last key that each row may see
    if there is no mask.
    """
    of_keys = of_sequence + position.to(tl.int64) * stride_t
    if MASK == "bias" and not BY_ROW:
        mask = tl.load(of_keys, mask=seen, other=0)[None, :]
    allowed = seen[None, :] & (position[None, :] <= last[:, None])
    if MASK != "none" and BY_ROW:
        of_rows = head.to(tl.int64) * stride_n + query.to(tl.int64) * stride_s
        mask = tl.load(of_keys[None, :] + of_rows[:, None], mask=allowed & exists[:, None], other=0)
        if MASK == "bool":
            allowed = allowed & (mask != 0)
            # Keys that no row sees may hold anything, and 0 times NaN is NaN: they are not loaded.
            seen = tl.max(allowed.to(tl.int32), 0) > 0
    return mask, allowed, seen
