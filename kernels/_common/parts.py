"""Choose into how many parts keys are divided among programs, so that a small batch fills the machine.

More parts mean more programs at a time, but also more partial results to write and to merge. Both are counted in keys
read: a program moves `rank + rope` numbers per key, reads each row's query once and, if there are several parts, writes
a float32 row of the output, which the merge reads again. Where keys are shared out by lengths on the device (`pieces`),
only the number of programs is chosen here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from .sizes import always, expected, is_symbol
from .tiles import power_of_two

_LAUNCH_KEYS = 71
"""The cost of a second launch, about 2.5 us, in keys of 1,152 B at 32.6 GB/s, a multiprocessor's share of an H200's
4.3 TB/s."""
_MOST_WAVES = 4
"""More parts than this many waves of programs only add to what is merged."""

_IDLE = 1.1
"""The ratio of processors, over all waves, to programs up to which the machine counts as full."""
_COLUMNS = 128
"""Columns that a program combines at a time: 512 bytes of each row of sums."""
_COMBINING = 4
"""Programs per multiprocessor that combine parts: with 8 loads of 512 bytes each, they wait for 16 KiB at a time, which
the multiprocessor's share of the bandwidth brings in half a microsecond."""
_NUMBERS = 4096
"""Numbers that such a program loads at a time: 32 for each of 128 threads."""
_FEW_PARTS, _MANY_PARTS = 4, 64
"""The fewest and the most parts that a program merges at a time."""
_FEW_LENGTHS, _MANY_LENGTHS = 32, 1024
"""How many lengths a program reads at a time: as many as a warp does alone, or enough for few rounds."""
_MOST_ROWS = 4
"""The most rows of a program that combines parts: one for each of its warps."""


@dataclass(frozen=True)
class Work:
    """Programs, and the partial results that they leave to be combined."""

    kind: str
    """`whole`: each group in one part; `parts`: each group in several; `shared`: all sequences shared out."""
    programs: int
    parts: int
    """The number of parts of a group, or of all keys where they are shared out."""
    slots: int = 0
    """Rows of partial sums, if there is more than one part."""
    combined: int = 0
    """Groups that may have to be combined."""
    batch: int = 0
    own: int = 0
    """What a program does for a sequence besides its keys, in tiles of keys."""

    @property
    def most_parts(self) -> int:
        """About how many parts there are to combine in each group."""
        if self.kind == "shared":  # each sequence's share, and the pieces in which it begins and ends
            return int(-(-expected(self.parts) // max(expected(self.batch), 1)) + 1)
        return int(expected(self.parts))

    @property
    def combines(self) -> bool:
        """Whether partial sums are written and combined. If the number of parts is a symbol, they are, even for one."""
        return is_symbol(self.parts) or self.parts > 1


def in_parts(groups: int, rows: int, tiles: int, parts: int) -> Work:
    """The work of each group's keys cut into `parts`, each part once for each of the group's tiles of rows."""
    if not is_symbol(parts) and parts == 1:
        return Work("whole", groups * tiles, 1)
    return Work("parts", groups * tiles * parts, parts, parts * groups * rows, groups)


def shared_out(batch: int, rows: int, tiles: int, processors: int, own: float) -> Work:
    """The work of the keys of all sequences shared out together, once for each tile of a sequence's rows."""
    pieces = number_of_pieces(tiles, processors)
    slots = 2 * pieces * rows if is_symbol(pieces) or pieces > 1 else 0
    cut = torch.sym_min(batch, pieces - 1)
    combined = torch.sym_max(cut, 1) if is_symbol(pieces) else cut  # not every launcher accepts an empty grid
    return Work("shared", pieces * tiles, pieces, slots, combined, batch, max(round(own), 1))


def lengths_at_a_time(batch: int) -> int:
    """How many lengths a program reads at a time, to find its piece of the keys of `batch` sequences; 0 means none.

    Each program does so before its first key, and again when combining. Within a warp that takes no barriers; with
    1,024 lengths each round takes about ten.
    """
    return _FEW_LENGTHS if always(batch <= _FEW_LENGTHS) else _MANY_LENGTHS


def number_of_pieces(tiles: int, processors: int) -> int:
    """The number of pieces into which all keys are cut, if each piece takes `tiles` programs.

    They fill the machine once, or as many times as are needed to leave few processors idle.
    """
    if is_symbol(tiles):
        return torch.sym_max(_waves(expected(tiles), processors) * processors // torch.sym_max(tiles, 1), 1)
    return max(_waves(tiles, processors) * processors // tiles, 1)


@functools.cache
def _waves(tiles: int, processors: int) -> int:
    """How many times the pieces fill the machine."""
    waves = range(1, _MOST_WAVES + 1)
    pieces = [max(wave * processors // tiles, 1) for wave in waves]
    idle = [-(-piece * tiles // processors) * processors / (piece * tiles) for piece in pieces]
    full = (wave for wave, share in zip(waves, idle, strict=True) if share <= _IDLE)
    return next(full, waves[idle.index(min(idle))])


def combination(work: Work, rows: int, rank: int, processors: int) -> dict[str, int]:
    """The tile of a program that combines parts of groups of `rows` rows: as many parts as there are, up to a limit,
    and just so many rows that all processors have something to do."""
    groups, rows = expected(work.combined), expected(rows)
    parts = min(max(1 << (work.most_parts - 1).bit_length(), _FEW_PARTS), _MANY_PARTS)
    columns = min(power_of_two(rank), _COLUMNS, _NUMBERS // parts)
    blocks = -(-rank // columns)
    wave = _COMBINING * processors
    most = min(_MOST_ROWS, _NUMBERS // (parts * columns))
    at_once = min(1 << max(math.ceil(groups * rows * blocks / wave) - 1, 0).bit_length(), most)
    spread = blocks
    while spread > 1 and groups * -(-rows // at_once) * spread > wave:
        spread //= 2
    return {"ROWS": at_once, "COLUMNS": columns, "PARTS": parts, "SPREAD": spread}


def number_of_parts(programs: int, keys: int, least: int, processors: int, row_keys: float) -> int:
    """The number of parts that takes the least time; if `programs` is a symbol, as many as fill the machine once.

    Args: programs, the tiles of rows of all groups; keys, the most keys of a group; least, the fewest keys of a part;
    processors; row_keys, the cost of the partial result of a tile of rows, in keys.
    """
    most = max(-(-keys // least), 1)
    if most == 1:
        return 1
    if is_symbol(programs):
        return torch.sym_max(torch.sym_min(processors // torch.sym_max(programs, 1), most), 1)
    return _fastest(programs, keys, most, processors, row_keys)


@functools.cache
def _fastest(programs: int, keys: int, most: int, processors: int, row_keys: float) -> int:
    best, best_time = 1, float("inf")
    for parts in range(1, most + 1):
        time = _time(programs, parts, keys, processors, row_keys)
        if time < best_time:
            best, best_time = parts, time
        if programs * parts > _MOST_WAVES * processors:
            break
    return best


def _time(programs: int, parts: int, keys: int, processors: int, row_keys: float) -> float:
    waves = -(-programs * parts // processors)
    time = waves * (keys / parts + row_keys)
    if parts > 1:
        merged = programs * parts * row_keys / processors
        time += merged + _LAUNCH_KEYS
    return time
