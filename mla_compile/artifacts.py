"""What a compiled artifact in torch's caches depends on besides its graph."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mla_compile.kernels
import mla_compile.passes

from .options import Options
from .version import __version__


@cache
def _sources() -> str:
    """A hash of everything that decides what a graph is rewritten to."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    here = Path(__file__).parent
    for folder in (here, Path(mla_compile.passes.__path__[0]), Path(mla_compile.kernels.__path__[0])):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_tag(options: Options, rates: Any, packages: tuple[str, ...] = ()) -> str:
    """What a compiled artifact depends on besides its graph: options, the passes' version, the device's rates, other
    projects' packages that the report names, and among several processes which one this is: each knows where its keys
    are among those of all."""
    rank = (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
    return "mla:" + hashlib.sha256(repr((options, rates, packages, rank, _sources())).encode()).hexdigest()
