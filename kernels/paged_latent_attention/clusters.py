"""Programs of two thread blocks on Hopper (clusters): each block has 64 rows of its own, both have the same keys.

The copy engine reads keys once and writes them to the shared memory of both. `blocks` is 1 or 2: with one, layouts are
as elsewhere. With two, the compiler of Triton 3.9 has the first block alone issue copies, and wait for a barrier that
the blocks share, at which both arrive, and lets neither block end before the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .taken import TILE, copy, load_box


@gluon.constexpr_function
def apart(blocks, rank):
    """How blocks divide a tensor: by its first dim."""
    return [[1] + [0] * (rank - 1)] if blocks == 2 else []


@gluon.constexpr_function
def alike(blocks, rank):
    """How blocks divide a tensor of which each has all."""
    return [[0] * rank] if blocks == 2 else []


@gluon.constexpr_function
def boxes_in(blocks):
    """How what is loaded is laid out in shared memory."""
    return gl.NVMMASharedLayout(128, 16, 3, cga_layout=alike(blocks, 3))


@gluon.constexpr_function
def a_barrier_each(blocks):
    """The layout of a barrier that each block has for itself."""
    return mbarrier.MBarrierLayout(apart(blocks, 1))


@gluon.constexpr_function
def a_barrier_for_all(blocks):
    """The layout of a barrier that the blocks share."""
    return mbarrier.MBarrierLayout(alike(blocks, 1))


@gluon.jit
def load_box_for_all(of_pages, page, row, column, full, box, BLOCKS: gl.constexpr):
    """Load a box `[64, columns]` to the shared memory of each block: the rows of a page from `row` on."""
    if BLOCKS == 1:
        load_box(of_pages, page, row, column, full, box)
    else:
        box = box.reinterpret(shape=[1, TILE, box.shape[1]], layout=boxes_in(BLOCKS))
        copy(of_pages, [page, row, column], full, box, multicast=True)
