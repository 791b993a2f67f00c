"""Choose the tiles of the kernel in `kernel.py` from the sizes of a problem, the machine, and a small table.

The table was made by compiling ahead of time for each architecture. It holds tiles that spill nothing in the loop for
DeepSeek's ranks, and that load the next keys while some are attended to. Which of those pay was measured on an H200
for few rows of keys that are no codes, and for many rows of codes; else it was only counted in the machine code, and
`mode="max-autotune"` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .machine import Machine

MaskKind = Literal["none", "of keys", "of rows"]
"""What a mask depends on: nothing (there is none), the key, or the key and the row."""
LEAST = 16
"""The least size of each dim of a product on matrix units."""
_WIDEST = 512
"""The number of latent columns that the table's tiles are made for; wider latents take fewer rows."""
_WIDEST_ROPE = 128
"""The same for the columns of rope keys, where these are in registers."""


@dataclass(frozen=True)
class Tiles:
    """What a program computes at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Stages of the software pipeline: keys are loaded one tile less than this ahead."""


@dataclass(frozen=True)
class ArchTiles:
    """An architecture's tiles."""

    few: Tiles
    """For groups of up to 16 rows."""
    many: Tiles
    """For groups of more rows."""
    fp8: Tiles
    """For more rows and keys in FP8 or INT8; if these tiles have at most 16 rows, for few rows too."""
    masked: Tiles
    """For more rows under a mask that is the same for all of them; if these tiles have at most 16 rows, for few too."""
    by_row: Tiles
    """For any number of rows under a mask that differs between them, which takes a tile of addresses."""


SMALLEST = Tiles(LEAST, LEAST, 4, 1)
_SMALL = Tiles(32, 32, 8, 2)
_TABLE: dict[str, ArchTiles] = {
    "sm_80": ArchTiles(Tiles(16, 32, 4, 3), Tiles(32, 32, 8, 3), Tiles(16, 32, 4, 3), _SMALL, Tiles(16, 32, 4, 3)),
    "sm_90": ArchTiles(
        Tiles(16, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 3), Tiles(16, 64, 8, 3)
    ),
    # Tensor memory does not hold 64 x 512 sums beside the scores; 32 rows take no tensor memory.
    "sm_100": ArchTiles(
        Tiles(16, 64, 8, 3), Tiles(32, 32, 8, 3), Tiles(32, 64, 8, 3), Tiles(32, 16, 8, 3), Tiles(16, 64, 8, 2)
    ),
    "sm_120": ArchTiles(Tiles(16, 32, 8, 3), _SMALL, _SMALL, *[Tiles(16, 16, 8, 2)] * 2),
    "gfx942": replace(ArchTiles(*[Tiles(16, 32, 4, 1)] * 5), fp8=Tiles(16, 16, 4, 1)),
}
_WORDS = Tiles(32, 64, 8, 3)
"""For 17 to 32 rows and keys in FP8 or INT8 on Hopper: half of 64 rows would be padding, and `words` takes 32."""
MOST_ROWS_OF_WORDS = _WORDS.rows
"""The most rows of a program that loads codes as `words`."""
_FLOAT32 = Tiles(16, 16, 8, 2)
"""Products of float32 do not use the matrix units, and take twice the memory."""
_SUMS = 128
"""The most registers of a thread, of 255, for sums: more would leave too few for scores and addresses."""
_TENSOR_COLUMNS = 512
"""The float32 columns of sm_100's tensor memory, which has the sums and the scores of 64 rows. If it has no room for
them, what Triton compiles is a trap."""


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` and at least what a matrix unit takes."""
    return max(1 << (size - 1).bit_length(), LEAST)


def columns(rank: int) -> tuple[int, int]:
    """Widths of the two blocks of latent columns, powers of two that together hold `rank`; the second may be 0."""
    first = power_of_two(-(-rank // 2))
    return first, power_of_two(rank - first) if rank > first else 0


def blocks(width: int) -> tuple[int, int]:
    """Widths of one or two blocks of columns, powers of two, that together hold `width` with the least padding."""
    whole = power_of_two(width)
    first = whole // 2
    if width == whole or first < LEAST:
        return whole, 0
    second = power_of_two(width - first)
    return (first, second) if first + second < whole else (whole, 0)


def constants_of_heads(widths: tuple[int, int, int], tiles: Tiles) -> dict[str, int]:
    """The constants of a kernel that takes keys and values of each head; widths are `P, R, V`."""
    nope, rope, columns = widths
    (p_a, p_b), (v_a, v_b) = blocks(nope), blocks(columns)
    return {
        "P": nope,
        "R": rope,
        "V": columns,
        "P_A": p_a,
        "P_B": p_b,
        "ROPE": power_of_two(rope) if rope else 0,
        "V_A": v_a,
        "V_B": v_b,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
    }


def family(machine: Machine) -> str:
    """The key of the table for a machine: the greatest NVIDIA architecture that is no greater; `gfx942` for all of AMD.

    Below sm_80 it is `sm_80`.
    """
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
    """Tiles for groups of `rows` rows, latents of `rank` and rope keys of `rope` columns, in one byte each if `fp8`.

    Latents wider than the table is made for take fewer rows, and so do wider rope keys on sm_100. Where the tiles do
    not fit the machine's memory, they are shrunk.
    """
    choice = _TABLE[family(machine)]
    if itemsize == 4:
        # On AMD a thread has 512 registers if a program has 4 waves, and half as many if it has 8.
        tiles = replace(_FLOAT32, warps=4) if family(machine) == "gfx942" else _FLOAT32
    elif mask == "of rows":
        tiles = choice.by_row
    elif rows <= choice.few.rows:
        special = choice.masked if mask != "none" else choice.fp8 if fp8 else choice.few
        tiles = special if special.rows <= choice.few.rows else choice.few
    elif fp8 and mask == "none" and rows <= MOST_ROWS_OF_WORDS < choice.fp8.rows:
        tiles = _WORDS
    else:
        tiles = choice.fp8 if fp8 else choice.many
        if mask != "none" and (not fp8 or choice.masked.rows * choice.masked.keys < tiles.rows * tiles.keys):
            tiles = choice.masked
    if rope > _WIDEST_ROPE and family(machine) == "sm_100":
        tiles = replace(tiles, rows=LEAST)
    while tiles.rows > LEAST and tiles.rows * sum(columns(rank)) > choice.many.rows * _WIDEST:
        tiles = replace(tiles, rows=tiles.rows // 2)
    return shrunk(tiles, lambda tiles: fits(machine, tiles, rank, rope, itemsize))


def takes(machine: Machine, rank: int, rope: int, itemsize: int) -> bool:
    """Whether the least tiles for latents of `rank` and rope keys of `rope` columns fit the machine's shared memory."""
    if family(machine) == "gfx942":  # operands are in registers: a block of columns at a time passes through it
        widest = max(*columns(rank), power_of_two(rope))
        return SMALLEST.rows * widest * itemsize <= machine.shared_bytes
    return _shared_bytes(machine, SMALLEST, rank, rope, itemsize) <= machine.shared_bytes


def shrunk(tiles: Tiles, fits: Callable[[Tiles], bool]) -> Tiles:
    """Shrink tiles until they fit: fewer keys, then fewer stages, then fewer rows; the least tiles if none fits."""
    while tiles.keys > LEAST and not fits(tiles):
        tiles = replace(tiles, keys=tiles.keys // 2)
    while tiles.stages > 1 and not fits(tiles):
        tiles = replace(tiles, stages=tiles.stages - 1)
    while tiles.rows > LEAST and not fits(tiles):
        tiles = replace(tiles, rows=tiles.rows // 2)
    return tiles


def fits(machine: Machine, tiles: Tiles, rank: int, rope: int, itemsize: int) -> bool:
    """Whether what a program holds fits into shared memory, and its sums into the threads' registers and, where
    products have 64 rows on sm_100, into tensor memory."""
    width = sum(columns(rank))
    in_tensor_memory = family(machine) == "sm_100" and _is_of_warp_groups(machine, tiles)
    return (
        _shared_bytes(machine, tiles, rank, rope, itemsize) <= machine.shared_bytes
        and tiles.rows * width <= _SUMS * 32 * tiles.warps
        and not (in_tensor_memory and width + tiles.keys > _TENSOR_COLUMNS)
    )


def _is_of_warp_groups(machine: Machine, tiles: Tiles) -> bool:
    """Whether products are Hopper's or sm_100's of 64 rows, which read keys from shared memory."""
    return family(machine) in ("sm_90", "sm_100") and tiles.rows >= 64


def _shared_bytes(machine: Machine, tiles: Tiles, rank: int, rope: int, itemsize: int) -> int:
    """Bytes of the queries, of the tiles of keys held at a time and of the weights of one tile."""
    row = sum(columns(rank)) + (power_of_two(rope) if rope else 0)
    # Products of 64 rows read their keys from shared memory while the next are loaded: one more tile.
    buffers = tiles.stages if _is_of_warp_groups(machine, tiles) else max(tiles.stages - 1, 1)
    return ((tiles.rows + tiles.keys * buffers) * row + tiles.rows * tiles.keys) * itemsize
