"""Tiles of the kernel: from the sizes of a problem, the machine, and a small table.

The table was made by compiling ahead of time for each architecture: it holds the largest tiles that leave nothing to
spill, for the ranks of DeepSeek. What pays among those was not measured; `mode="max-autotune"` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .machine import Machine

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
    """Of the software pipeline: 2 loads one tile of keys ahead."""


_TABLE: dict[str, tuple[Tiles, Tiles]] = {
    # up to 16 rows of a group, and FP8   more rows
    "sm_80": (Tiles(16, 32, 4, 2), Tiles(32, 32, 8, 2)),
    "sm_90": (Tiles(16, 64, 8, 2), Tiles(64, 16, 8, 2)),
    # Tensor memory does not hold 64 x 512 sums beside the scores; 32 rows take no tensor memory.
    "sm_100": (Tiles(16, 64, 8, 2), Tiles(32, 32, 8, 2)),
    "sm_120": (Tiles(16, 32, 4, 2), Tiles(32, 32, 8, 2)),
    "gfx942": (Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
}
_FLOAT32 = Tiles(16, 16, 8, 2)
"""Products of float32 take no matrix unit, and twice the memory."""


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


def choose(machine: Machine, rows: int, rank: int, rope: int, itemsize: int, fp8: bool) -> Tiles:
    """Tiles for groups of `rows` rows, latents of `rank` and rope keys of `rope` columns, in FP8 or not.

    Where the table's do not fit the machine's shared memory or the latent is wider than the table knows, there are
    fewer keys, then fewer stages, then fewer rows.
    """
    few, many = _TABLE[family(machine)]
    tiles = _FLOAT32 if itemsize == 4 else few if fp8 or rows <= few.rows else many
    while tiles.rows > LEAST and tiles.rows * sum(columns(rank)) > many.rows * _WIDEST:
        tiles = replace(tiles, rows=tiles.rows // 2)
    while tiles.keys > LEAST and not fits(machine, tiles, rank, rope, itemsize):
        tiles = replace(tiles, keys=tiles.keys // 2)
    while tiles.stages > 1 and not fits(machine, tiles, rank, rope, itemsize):
        tiles = replace(tiles, stages=tiles.stages - 1)
    while tiles.rows > LEAST and not fits(machine, tiles, rank, rope, itemsize):
        tiles = replace(tiles, rows=tiles.rows // 2)
    return tiles


def fits(machine: Machine, tiles: Tiles, rank: int, rope: int, itemsize: int) -> bool:
    """Whether there is shared memory for the queries, and for as many tiles of keys as there are stages."""
    width = sum(columns(rank)) + (power_of_two(rope) if rope else 0)
    return (tiles.rows + tiles.keys * tiles.stages) * width * itemsize <= machine.shared_bytes
