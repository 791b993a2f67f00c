"""Rows of which the columns are loaded, kept and stored in two blocks, A and B, or in one if the width of B is 0.

Two products of half the width leave the compiler enough registers, which one product of the whole width does not (512
columns of 64 rows are half of a Hopper multiprocessor's registers). A block that a kernel does without is another
tensor of its own, never read: what a branch assigns has to have one type.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, offsets, seen, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load `[rows, BLOCK]`: columns from FIRST on of the rows at these offsets, 0 from WIDTH on or where not `seen`."""
    columns = FIRST + tl.arange(0, BLOCK)
    mask = seen[:, None]
    if FIRST + BLOCK > WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(base + (offsets[:, None] + columns[None, :]), mask=mask, other=0)


@triton.jit
def load_blocks(base, offsets, seen, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Load `[rows, A]` and `[rows, B]`: the WIDTH columns of the rows at these offsets, as `load_rows` does."""
    a = load_rows(base, offsets, seen, 0, WIDTH, A)
    b = a
    if B:
        b = load_rows(base, offsets, seen, A, WIDTH, B)
    return a, b


@triton.jit
def load_rope(base, offsets, seen, instead, R: tl.constexpr, ROPE: tl.constexpr):
    """Load `[rows, ROPE]`: R columns, as `load_rows` does; `instead` if there are none."""
    rope = instead
    if R:
        rope = load_rows(base, offsets, seen, 0, R, ROPE)
    return rope


@triton.jit
def no_sums(ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Zeros `[ROWS, A]` and `[ROWS, B]`, float32."""
    a = tl.zeros([ROWS, A], tl.float32)
    b = a
    if B:
        b = tl.zeros([ROWS, B], tl.float32)
    return a, b


@triton.jit
def product(x_a, x_b, x_r, y_a, y_b, y_r, B: tl.constexpr, R: tl.constexpr):
    """`x @ y^T`, summed over the columns of A, of B, and of a rope."""
    sums = tl.dot(x_a, tl.trans(y_a), input_precision="ieee")
    if B:
        sums = tl.dot(x_b, tl.trans(y_b), sums, input_precision="ieee")
    if R:
        sums = tl.dot(x_r, tl.trans(y_r), sums, input_precision="ieee")
    return sums


@triton.jit
def add_products(sums_a, sums_b, x, a, b, B: tl.constexpr):
    """`sums + x @ y`, where the columns of y are the blocks a and b."""
    sums_a = tl.dot(x, a, sums_a, input_precision="ieee")
    if B:
        sums_b = tl.dot(x, b, sums_b, input_precision="ieee")
    return sums_a, sums_b


@triton.jit
def store_columns(base, offsets, values, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store BLOCK columns from FIRST on, as far as WIDTH, of the rows at these offsets."""
    columns = FIRST + tl.arange(0, BLOCK)
    mask = exists[:, None]
    if FIRST + BLOCK > WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(base + (offsets[:, None] + columns[None, :]), values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_blocks(base, offsets, a, b, exists, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Store two blocks as the WIDTH columns of the rows at these offsets."""
    store_columns(base, offsets, a, exists, 0, WIDTH, A)
    if B:
        store_columns(base, offsets, b, exists, A, WIDTH, B)


@triton.jit
def store_tiles(base, offsets, tiles, exists, WIDTH: tl.constexpr):
    """Store tiles `[rows, BLOCK]`, side by side, as the WIDTH columns of the rows at these offsets."""
    for i in tl.static_range(len(tiles)):
        store_columns(base, offsets, tiles[i], exists, i * tiles[0].shape[1], WIDTH, tiles[i].shape[1])
