"""Tiles that were measured to be the fastest: what `mode="max-autotune"` adds to the table.

While `tuning` is on, the first launch of a problem times its candidates and keeps the best, in this process and on
disk, under Inductor's cache directory: a file for each machine, Triton and version of the kernels. Sizes that grow as a
sequence does are taken by their powers of two. During the capture of a CUDA graph nothing is timed, and a problem that
is not known yet takes its tiles from the table.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from ... import cache_files
from .machine import Machine
from .tiles import LEAST, Tiles

_log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object]], float]
"""Seconds, or any number that grows with them, that a call takes."""

_TIMER: ContextVar[Timer | None] = ContextVar("timer", default=None)
_KNOWN: dict[tuple[Path, str], Tiles] = {}


@contextlib.contextmanager
def tuning(timer: Timer | None = None) -> Iterator[None]:
    """Launches in this context time their candidates, by `timer` (None: on the device)."""
    token = _TIMER.set(timer or _device_seconds)
    try:
        yield
    finally:
        _TIMER.reset(token)


def is_on() -> bool:
    """Whether launches here and now time their candidates."""
    return _TIMER.get() is not None


def tuned(
    machine: Machine,
    problem: Sequence[object],
    default: Tiles,
    candidates: Callable[[], Sequence[Tiles]],
    run: Callable[[Tiles], object],
) -> Tiles:
    """The best tiles for a problem; `default` while tuning is off, or where nothing may or can be timed.

    `problem` is all that the choice may depend on besides the machine; `run` launches the problem with some tiles.
    """
    timer = _TIMER.get()
    if timer is None:
        return default
    path, key = _file(machine), " ".join(map(str, problem))
    if (path, key) in _KNOWN:
        return _KNOWN[path, key]
    best = _read(path).get(key)
    if best is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return default
        best = _fastest(timer, (default, *candidates()), run) or default
        _write(path, key, best)
    _KNOWN[path, key] = best
    return best


def neighbours(tiles: Tiles, fits: Callable[[Tiles], bool]) -> list[Tiles]:
    """Tiles not far from those of the table that the machine has the memory for, the likeliest first."""
    found = [
        replace(tiles, keys=keys, warps=warps, stages=stages)
        for warps in (tiles.warps, 12 - tiles.warps)
        for keys in (tiles.keys, tiles.keys // 2, tiles.keys * 2)
        for stages in range(max(tiles.stages - 1, 1), tiles.stages + 3)
    ]
    found += [replace(tiles, rows=rows) for rows in (tiles.rows // 2, tiles.rows * 2)]
    return [t for t in found if t != tiles and min(t.rows, t.keys) >= LEAST and fits(t)]


def bucket(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(size - 1, 0).bit_length()


def _fastest(timer: Timer, candidates: Sequence[Tiles], run: Callable[[Tiles], object]) -> Tiles | None:
    from triton.errors import TritonError

    best, best_time = None, float("inf")
    # A launch within a timed launch takes the tiles that it is given.
    token = _TIMER.set(None)
    try:
        for tiles in dict.fromkeys(candidates):
            try:
                time = timer(functools.partial(run, tiles))
            except TritonError as error:  # more registers or memory than there are
                _log.info("%s: %s", tiles, error)
                continue
            if time < best_time:
                best, best_time = tiles, time
    finally:
        _TIMER.reset(token)
    return best


def _device_seconds(call: Callable[[], object]) -> float:
    import triton.testing

    milliseconds: float = triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")
    return milliseconds / 1000


@functools.cache
def _version() -> str:
    """Of Triton and of the kernels: what their speed depends on."""
    import triton

    digest = hashlib.sha256(f"{triton.__version__} {torch.__version__}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _file(machine: Machine) -> Path:
    return cache_files.path_of(f"tiles-{machine.arch}-{machine.processors}-{_version()}")


def _read(path: Path) -> dict[str, Tiles]:
    def parse(stored: Any) -> dict[str, Tiles]:
        return {key: Tiles(*map(int, sizes)) for key, sizes in stored.items()}

    return cache_files.read(path, parse) or {}


def _write(path: Path, key: str, tiles: Tiles) -> None:
    """Add an entry."""
    from torch.utils._filelock import FileLock

    with FileLock(f"{path}.lock"):
        entries = {known: astuple(sizes) for known, sizes in _read(path).items()} | {key: astuple(tiles)}
        cache_files.write(path, entries)
