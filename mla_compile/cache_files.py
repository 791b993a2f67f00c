"""JSON files beside Inductor's own: what is worth keeping for later processes.

A reader finds the old file or the whole new one. `FileLock(f"{path}.lock")` is for who reads, changes and writes.
`torch.compiler.save_cache_artifacts` has those that a process read or wrote: without them no artifact is served
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def path_of(name: str) -> Path:
    """`<inductor cache>/mla_compile/NAME.json`, in a folder that is there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "mla_compile"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def read(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What `parse` makes of a file's content; None where the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text())
        parsed = parse(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    _remember(path, content)
    return parsed


def write(path: Path, content: Any) -> None:
    """Put content in the place of what there is, in one step."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path)
    _remember(path, content)


def _remember(path: Path, content: Any) -> None:
    """Have a file among the artifacts that torch saves, as one that Inductor tunes by: JSON in its cache directory.

    A kind of our own would be unknown, and the others lost with it, to who loads them before this package is imported.
    """
    with contextlib.suppress(ImportError, AttributeError):  # parts of torch that are its own
        from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
        from torch.compiler._cache import CacheArtifactManager

        kind = AutotuneCacheArtifact.type()
        CacheArtifactManager.record_artifact(kind, f"{path.parent.name}/{path.name}", content)
