"""Tiles of the kernel: from the sizes of a problem, the machine, and a small table.

The table was made by compiling ahead of time for each architecture: it holds tiles that leave nothing to spill for the
ranks of DeepSeek, and load the next keys while some are attended to. What pays among those was not measured, only
counted in the machine code; `mode="max-autotune"` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .machine import Machine

MaskKind = Literal["none", "of keys", "of rows"]
"""What a mask speaks of: nothing, each key, or each key and row."""
LEAST = 16
"""The least size of a side of a product on matrix units."""
_WIDEST = 512
"""Columns of latent that the tiles of the table are made for; wider latents take fewer rows."""


@dataclass(frozen=True)
class Tiles:
    """What a program computes at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Of the software pipeline: keys are loaded so many tiles ahead, less one."""


@dataclass(frozen=True)
class ArchTiles:
    """An architecture's tiles."""

    few: Tiles
    """For up to 16 rows of a group."""
    many: Tiles
    fp8: Tiles
    """For more rows, keys in FP8 or INT8; with no more than 16 rows, for few too."""
    masked: Tiles
    """For more rows, under a mask that says the same of each; with no more than 16 rows, for few too."""
    by_row: Tiles
    """For any rows, under a mask that says something else of each: a tile of addresses."""


_SMALL = Tiles(32, 32, 8, 2)
_TABLE: dict[str, ArchTiles] = {
    "sm_80": ArchTiles(Tiles(16, 32, 4, 3), Tiles(32, 32, 8, 3), Tiles(16, 32, 4, 3), _SMALL, Tiles(16, 32, 4, 3)),
    "sm_90": ArchTiles(
        Tiles(16, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 3), Tiles(64, 32, 8, 3), Tiles(16, 64, 8, 3)
    ),
    # Tensor memory does not hold 64 x 512 sums beside the scores; 32 rows take no tensor memory.
    "sm_100": ArchTiles(
        Tiles(16, 64, 8, 3), Tiles(32, 32, 8, 3), Tiles(32, 16, 8, 3), Tiles(32, 16, 8, 3), Tiles(16, 64, 8, 2)
    ),
    "sm_120": ArchTiles(Tiles(16, 32, 8, 3), _SMALL, Tiles(32, 16, 8, 3), *[Tiles(16, 16, 8, 2)] * 2),
    "gfx942": replace(ArchTiles(*[Tiles(16, 32, 4, 1)] * 5), fp8=Tiles(16, 16, 4, 1)),
}
_FLOAT32 = Tiles(16, 16, 8, 2)
"""Products of float32 take no matrix unit, and twice the memory."""
_SUMS = 128
"""Registers of a thread for sums, of 255: more leave too few for scores and addresses."""


def power_of_two(size: int) -> int:
    """The least power of two that is no less, and no less than a matrix unit takes."""
    return max(1 << (size - 1).bit_length(), LEAST)


def columns(rank: int) -> tuple[int, int]:
    """Widths of the two blocks of latent columns, powers of two that together hold `rank`; the second may be 0."""
    first = power_of_two(-(-rank // 2))
    return first, power_of_two(rank - first) if rank > first else 0


def family(machine: Machine) -> str:
    """The table's entry that fits best: the greatest that is no greater, or what has as much shared memory."""
    if machine.arch.startswith("gfx"):
        return "gfx942"
    capability = int(machine.arch.removeprefix("sm_"))
    for least in (120, 100, 90):
        if capability >= least:
            return f"sm_{least}"
    return "sm_80"


def choose(
    machine: Machine, rows: int, rank: int, rope: int, itemsize: int, fp8: bool, mask: MaskKind = "none"
) -> Tiles:
    """Tiles for groups of `rows` rows, latents of `rank` and rope keys of `rope` columns, in a byte (`fp8`) or not.

    Where the table's do not fit the machine's shared memory or the latent is wider than the table knows, there are
    fewer keys, then fewer stages, then fewer rows.
    """
    choice = _TABLE[family(machine)]
    if itemsize == 4:
        # A wave of AMD has 512 registers a thread where there are 4, and half as many where there are 8.
        tiles = replace(_FLOAT32, warps=4) if family(machine) == "gfx942" else _FLOAT32
    elif mask == "of rows":
        tiles = choice.by_row
    elif rows <= choice.few.rows:
        special = choice.masked if mask != "none" else choice.fp8 if fp8 else choice.few
        tiles = special if special.rows <= choice.few.rows else choice.few
    else:
        tiles = choice.fp8 if fp8 else choice.many if mask == "none" else choice.masked
    while tiles.rows > LEAST and tiles.rows * sum(columns(rank)) > choice.many.rows * _WIDEST:
        tiles = replace(tiles, rows=tiles.rows // 2)
    return shrunk(tiles, lambda tiles: fits(machine, tiles, rank, rope, itemsize))


def shrunk(tiles: Tiles, fits: Callable[[Tiles], bool]) -> Tiles:
    """Tiles that fit, of fewer keys, then in fewer stages, then of fewer rows; the least there are if none does."""
    while tiles.keys > LEAST and not fits(tiles):
        tiles = replace(tiles, keys=tiles.keys // 2)
    while tiles.stages > 1 and not fits(tiles):
        tiles = replace(tiles, stages=tiles.stages - 1)
    while tiles.rows > LEAST and not fits(tiles):
        tiles = replace(tiles, rows=tiles.rows // 2)
    return tiles


def fits(machine: Machine, tiles: Tiles, rank: int, rope: int, itemsize: int) -> bool:
    """Whether there is shared memory for the queries, the tiles of keys that are there at a time, and the weights of
    one; and whether the threads have registers for the sums."""
    width = sum(columns(rank))
    row = width + (power_of_two(rope) if rope else 0)
    # Hopper's product of 64 rows reads its keys from shared memory while the next are loaded: one tile more.
    several = family(machine) == "sm_90" and tiles.rows >= 64
    buffers = tiles.stages if several else max(tiles.stages - 1, 1)
    shared = (tiles.rows + tiles.keys * buffers) * row + tiles.rows * tiles.keys
    return shared * itemsize <= machine.shared_bytes and tiles.rows * width <= _SUMS * 32 * tiles.warps
