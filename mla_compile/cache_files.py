"""JSON files in Inductor's cache directory that later processes reuse.

A reader finds either the old file or the complete new one. Code that reads, changes and writes a file should hold
`FileLock(f"{path}.lock")`. `torch.compiler.save_cache_artifacts` includes the files that a process read or wrote:
without them no artifact would be served elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


def path_of(name: str) -> Path:
    """The path `<inductor cache>/mla_compile/NAME.json`; its folder is created if needed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "mla_compile"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def read(path: Path, parse: Callable[[Any], T]) -> T | None:
    """The result of `parse` on a file's content; None if the file is missing or `parse` cannot read it."""
    try:
        content = json.loads(path.read_text())
        parsed = parse(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    _remember(path, content)
    return parsed


def write(path: Path, content: Any) -> None:
    """Replace the content of a file atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path)
    _remember(path, content)


def _remember(path: Path, content: Any) -> None:
    """Add a file to the artifacts that torch saves, as an autotuning result: those are JSON files in Inductor's cache.

    An artifact type of our own would be unknown to a process that loads artifacts before it imports this package, and
    the others would be lost with it.
    """
    try:  # private parts of torch
        from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
        from torch.compiler._cache import CacheArtifactManager

        kind = AutotuneCacheArtifact.type()
        CacheArtifactManager.record_artifact(kind, f"{path.parent.name}/{path.name}", content)
    except (ImportError, AttributeError) as error:
        _log.info("%s is not among torch's artifacts: %s: %s", path, type(error).__name__, error)
