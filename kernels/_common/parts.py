"""In how many parts the keys of a group are attended to, so that a small batch fills the machine.

More parts mean more programs at a time, and more partial results to write and to merge. Both are counted in keys read:
a program moves `rank + rope` numbers a key, reads a row's query once and, of several parts, writes a float32 row of the
output, which the merge reads again. Lengths are on the device and not known: what is counted is the longest that fits.
"""

from __future__ import annotations

import functools

_LAUNCH_KEYS = 71
"""A second launch, about 2.5 us, in keys of 1,152 B at a multiprocessor's share of an H200's 4.3 TB/s, 32.6 GB/s."""
_MOST_WAVES = 4
"""More parts than this many waves of programs only add to what is merged."""


@functools.cache
def number_of_parts(programs: int, keys: int, least: int, processors: int, row_keys: float) -> int:
    """The number of parts with the least time.

    Args: programs, tiles of rows of all groups; keys of a group at most; least, keys of a part at least; processors;
    row_keys, what the partial result of a tile of rows costs, in keys.
    """
    most = max(-(-keys // least), 1)
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
