"""Choose the tiles of the kernel in `kernel.py` from the sizes of a problem, the machine, and a small table.

The table was made like that of `_common.tiles`: the largest tiles that do not spill, for DeepSeek's head widths.
"""

from __future__ import annotations

from dataclasses import replace

from .._common.machine import Machine
from .._common.tiles import LEAST, SMALLEST, Tiles, blocks, family, power_of_two, shrunk

_TABLE = {
    "sm_80": Tiles(128, 32, 8, 3),
    "sm_90": Tiles(128, 64, 8, 3),
    "sm_100": Tiles(128, 64, 8, 3),
    "sm_120": Tiles(64, 32, 4, 3),
    "gfx942": Tiles(64, 32, 4, 1),
}
_MASKED = {"sm_90": Tiles(64, 64, 8, 3), "sm_120": Tiles(64, 16, 4, 3)}
"""Smaller tiles where there is a mask tensor, whose tile takes registers too."""
_WIDEST = 128
"""The number of value columns that the table's tiles are made for; wider values take fewer queries."""
_FLOAT32 = Tiles(32, 16, 8, 2)
"""Products of float32 do not use the matrix units, and take twice the memory."""


def choose(machine: Machine, nope: int, rope: int, columns: int, itemsize: int, masked: bool = False) -> Tiles:
    """Tiles of queries and keys for heads of these widths.

    Values wider than the table is made for take fewer queries. Where the tiles do not fit the machine's shared memory,
    they are shrunk.
    """
    known = _TABLE[family(machine)]
    tiles = _FLOAT32 if itemsize == 4 else _MASKED.get(family(machine), known) if masked else known
    while tiles.rows > LEAST and tiles.rows * sum(blocks(columns)) > known.rows * _WIDEST:
        tiles = replace(tiles, rows=tiles.rows // 2)
    return shrunk(tiles, lambda tiles: fits(machine, tiles, nope, rope, columns, itemsize))


def takes(machine: Machine, nope: int, rope: int, columns: int, itemsize: int) -> bool:
    """Whether the least tiles for heads of these widths fit the machine's shared memory."""
    return fits(machine, SMALLEST, nope, rope, columns, itemsize)


def fits(machine: Machine, tiles: Tiles, nope: int, rope: int, columns: int, itemsize: int) -> bool:
    """Whether the queries, and as many tiles of keys and values as there are stages, fit into shared memory."""
    key, value = sum(blocks(nope)) + (power_of_two(rope) if rope else 0), sum(blocks(columns))
    return (tiles.rows * key + tiles.keys * tiles.stages * (key + value)) * itemsize <= machine.shared_bytes
