"""Choose the tiles of the kernels in `kernel.py`.

The table was made like that of `_common.tiles`: the largest tiles that do not spill, for DeepSeek's head widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._common.machine import Machine
from .._common.tiles import LEAST, Tiles, blocks, family, power_of_two, shrunk


@dataclass(frozen=True)
class Pair:
    """The tiles of both kernels."""

    to_queries: Tiles
    to_keys: Tiles


_TABLE = {
    "sm_80": Pair(Tiles(128, 32, 8, 2), Tiles(32, 32, 8, 2)),
    "sm_90": Pair(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2)),
    "sm_100": Pair(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2)),
    "sm_120": Pair(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    "gfx942": Pair(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
_MASKED = {
    "sm_80": Pair(Tiles(64, 16, 8, 2), Tiles(32, 32, 8, 2)),
    "sm_90": Pair(Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
    "sm_100": Pair(Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    "sm_120": Pair(Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2)),
}
"""Smaller tiles where there is a mask tensor, whose tile takes registers too."""
_WIDEST = 320
"""The number of columns of keys and values that the table's tiles are made for; wider heads take smaller tiles."""
_FLOAT32 = Pair(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1))
"""Products of float32 do not use the matrix units, and take twice the memory."""


def choose(machine: Machine, nope: int, rope: int, columns: int, itemsize: int, masked: bool = False) -> Pair:
    """The tiles for heads of these widths.

    Wider heads than the table is made for take smaller tiles, as do those that do not fit the machine's shared memory.
    """
    known = _TABLE[family(machine)]
    known = _FLOAT32 if itemsize == 4 else _MASKED.get(family(machine), known) if masked else known
    width = _width(nope, rope, columns)
    rows, keys = known.to_queries.rows, known.to_keys.keys
    while max(rows, keys) > LEAST and max(rows / known.to_queries.rows, keys / known.to_keys.keys) * width > _WIDEST:
        rows, keys = max(rows // 2, LEAST), max(keys // 2, LEAST)

    def fitting(tiles: Tiles, by_keys: bool) -> Tiles:
        return shrunk(tiles, lambda tiles: fits(machine, tiles, width, itemsize, by_keys))

    return Pair(fitting(replace(known.to_queries, rows=rows), False), fitting(replace(known.to_keys, keys=keys), True))


def takes(machine: Machine, nope: int, rope: int, columns: int, itemsize: int) -> bool:
    """Whether the chosen tiles for heads of these widths fit the machine."""
    pair, width = choose(machine, nope, rope, columns, itemsize), _width(nope, rope, columns)
    fitting = ((pair.to_queries, False), (pair.to_keys, True))
    return all(fits(machine, tiles, width, itemsize, by_keys) for tiles, by_keys in fitting)


def fits(machine: Machine, tiles: Tiles, width: int, itemsize: int, by_keys: bool) -> bool:
    """Whether what a program stays with, and as many tiles of what it goes through as there are stages, fit into shared
    memory, beside two tiles of weights. `width` is the number of columns of keys and values; `by_keys`: a program stays
    with keys."""
    stays, passes = (tiles.keys, tiles.rows) if by_keys else (tiles.rows, tiles.keys)
    # For products of wide heads in tensor memory, Triton 3.6 holds one more tile.
    buffers = tiles.stages + (family(machine) == "sm_100" and width > _WIDEST)
    numbers = (stays + passes * buffers) * width + 2 * tiles.rows * tiles.keys
    return numbers * itemsize <= machine.shared_bytes


def _width(nope: int, rope: int, columns: int) -> int:
    """The number of columns of keys and values, each block filled up to a power of two."""
    return sum(blocks(nope)) + (power_of_two(rope) if rope else 0) + sum(blocks(columns))
