"""Measure which tiles, or which of several implementations, are fastest: what `mode="max-autotune"` adds to the tables.

While `tuning` is on, the first launch of a problem times its candidates and keeps the best, in this process and on
disk, under Inductor's cache directory: one file per machine and version of Triton, torch and the kernels. Sizes that
grow with a sequence are rounded up to powers of two. During the capture of a CUDA graph nothing is timed, and a problem
that is not known yet takes the table's choice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from ... import cache_files
from ...asked import measured
from .agreement import O_AND_LSE, difference
from .machine import Machine
from .tiles import LEAST, Tiles

_log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object]], float]
"""The time that a call takes, in seconds or any monotonic unit."""

_TIMER: ContextVar[Timer | None] = ContextVar("timer", default=None)
_KNOWN: dict[tuple[Path, str], Tiles | str] = {}

C = TypeVar("C", Tiles, str)
"""Candidates: tiles, or names."""

Run: TypeAlias = Callable[[C], Sequence[Tensor]]


@contextlib.contextmanager
def tuning(timer: Timer | None = None) -> Iterator[None]:
    """Within this context, launches time their candidates by `timer` (None: on the device); so do those of gradients of
    what is computed in it, on the device."""
    with measured(), _timing_by(timer or device_seconds):
        yield


def untuned() -> contextlib.AbstractContextManager[None]:
    """A context in which launches take the tiles of the table, or those that they are given."""
    return _timing_by(None)


@contextlib.contextmanager
def _timing_by(timer: Timer | None) -> Iterator[None]:
    token = _TIMER.set(timer)
    try:
        yield
    finally:
        _TIMER.reset(token)


def is_on() -> bool:
    """Whether launches here and now time their candidates."""
    return _TIMER.get() is not None


def timer() -> Timer | None:
    """The timer of launches here and now; None while tuning is off."""
    return _TIMER.get()


def in_capture() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def tuned(
    machine: Machine,
    problem: Sequence[object],
    default: C,
    candidates: Callable[[], Sequence[C]],
    run: Run[C],
    names: Sequence[str] = O_AND_LSE,
) -> C:
    """The best candidate for a problem; `default` while tuning is off, or where nothing may or can be timed.

    `problem` is everything that the choice may depend on besides the machine; `run` computes the problem with a
    candidate, whose results have these names. One whose results differ from the default's is not taken.
    """
    present = timer()
    if present is None:
        return default
    path, key = _file(machine), " ".join(map(str, problem))
    if (path, key) in _KNOWN:
        return cast(C, _KNOWN[path, key])
    kept = _read(path).get(key)
    if kept is not None:
        best = cast(C, kept)
    elif in_capture():
        return default
    else:
        best = _fastest(present, [default], candidates(), run, names) or default
        _write(path, key, best)
    _KNOWN[path, key] = best
    return best


def neighbours(tiles: Tiles, fits: Callable[[Tiles], bool]) -> list[Tiles]:
    """Tiles close to the table's that fit the machine's memory, the likeliest first."""
    found = [
        replace(tiles, keys=keys, warps=warps, stages=stages)
        for warps in (tiles.warps, 12 - tiles.warps)
        for keys in (tiles.keys, tiles.keys // 2, tiles.keys * 2)
        for stages in range(max(tiles.stages - 1, 1), tiles.stages + 3)
    ]
    found += [replace(tiles, rows=rows) for rows in (tiles.rows // 2, tiles.rows * 2)]
    return [t for t in found if t != tiles and min(t.rows, t.keys) >= LEAST and fits(t)]


def bucket(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _fastest(timer: Timer, table: Sequence[C], others: Sequence[C], run: Run[C], names: Sequence[str]) -> C | None:
    best, best_time, expected = None, float("inf"), None
    with untuned():
        for candidate in dict.fromkeys(itertools.chain(table, others)):
            try:
                result = run(candidate)
                if expected is not None and (wrong := difference(result, expected, names)) is not None:
                    _log.warning("%s %s", candidate, wrong)
                    continue
                time = timer(functools.partial(run, candidate))
            except Exception as error:
                if not _cannot_be_compiled(error):
                    raise
                _log.info("%s: %s", candidate, error)
                continue
            expected = result if expected is None else expected
            if time < best_time:
                best, best_time = candidate, time
    return best


def _cannot_be_compiled(error: Exception) -> bool:
    """Whether Triton could not make a kernel: one that needs more registers or memory than there are, say.

    Where a pass of the compiler fails, it raises a RuntimeError, as a GPU does whose kernel failed.
    """
    from triton.errors import TritonError

    return isinstance(error, TritonError) or "PassManager::run failed" in str(error)


def device_seconds(call: Callable[[], object], warmup: int = 10, rep: int = 50) -> float:
    """The median seconds of a call by CUDA events, with the L2 cache flushed before each, after `warmup` ms of calls
    and over `rep` ms of them."""
    import triton.testing

    milliseconds: float = triton.testing.do_bench(call, warmup=warmup, rep=rep, return_mode="median")
    return milliseconds / 1000


@functools.cache
def _version() -> str:
    """A hash of Triton's and torch's versions and of the kernels: what their speed depends on."""
    import triton

    digest = hashlib.sha256(f"{triton.__version__} {torch.__version__}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _file(machine: Machine) -> Path:
    return cache_files.path_of(f"tiles-{machine.arch}-{machine.processors}-{_version()}")


def _read(path: Path) -> dict[str, Tiles | str]:
    def parse(stored: Any) -> dict[str, Tiles | str]:
        return {key: best if isinstance(best, str) else Tiles(*map(int, best)) for key, best in stored.items()}

    return cache_files.read(path, parse) or {}


def _write(path: Path, key: str, best: Tiles | str) -> None:
    """Add an entry."""
    from torch.utils._filelock import FileLock

    with FileLock(f"{path}.lock"):
        entries = _read(path) | {key: best}
        cache_files.write(path, {k: b if isinstance(b, str) else astuple(b) for k, b in entries.items()})
