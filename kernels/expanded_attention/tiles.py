"""Tiles of the kernel of chunks, from the sizes of a problem, the machine, and a small table.

The table was made like that of `_common.tiles`: the largest tiles that leave nothing to spill, for DeepSeek's heads.
"""

from __future__ import annotations

from dataclasses import replace

from .._common.machine import Machine
from .._common.tiles import LEAST, Tiles, family, power_of_two, shrunk

_TABLE = {
    "sm_80": Tiles(128, 32, 8, 3),
    "sm_90": Tiles(128, 64, 8, 3),
    "sm_100": Tiles(128, 64, 8, 3),
    "sm_120": Tiles(64, 32, 4, 3),
    "gfx942": Tiles(64, 32, 4, 1),
}
_MASKED = {"sm_90": Tiles(64, 64, 8, 3), "sm_120": Tiles(64, 16, 4, 3)}
"""Where a tile of a mask that no lengths or causal limit stand for takes the registers of others."""
_WIDEST = 128
"""Columns of values that the tiles of the table are made for; wider ones take fewer queries."""
_FLOAT32 = Tiles(32, 16, 8, 2)
"""Products of float32 take no matrix unit, and twice the memory."""


def blocks(width: int) -> tuple[int, int]:
    """Widths of at most two blocks of columns, powers of two that together hold `width`, as closely as they can."""
    whole = power_of_two(width)
    first = whole // 2
    if width == whole or first < LEAST:
        return whole, 0
    second = power_of_two(width - first)
    return (first, second) if first + second < whole else (whole, 0)


def choose(machine: Machine, nope: int, rope: int, columns: int, itemsize: int, masked: bool = False) -> Tiles:
    """Tiles of queries and keys for heads of these widths.

    Where the table's do not fit the machine's shared memory or the values are wider than the table knows, there are
    fewer keys, then fewer stages, then fewer queries.
    """
    known = _TABLE[family(machine)]
    tiles = _FLOAT32 if itemsize == 4 else _MASKED.get(family(machine), known) if masked else known
    while tiles.rows > LEAST and tiles.rows * sum(blocks(columns)) > known.rows * _WIDEST:
        tiles = replace(tiles, rows=tiles.rows // 2)
    return shrunk(tiles, lambda tiles: fits(machine, tiles, nope, rope, columns, itemsize))


def fits(machine: Machine, tiles: Tiles, nope: int, rope: int, columns: int, itemsize: int) -> bool:
    """Whether there is shared memory for the queries, and for as many tiles of keys and values as there are stages."""
    key, value = sum(blocks(nope)) + (power_of_two(rope) if rope else 0), sum(blocks(columns))
    return (tiles.rows * key + tiles.keys * tiles.stages * (key + value)) * itemsize <= machine.shared_bytes
