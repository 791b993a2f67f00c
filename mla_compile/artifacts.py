"""The key of compiled artifacts in torch's caches: what they depend on besides their graph."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import mla_compile.kernels
import mla_compile.passes

from .dynamo.seal import CACHEABLE
from .options import Options
from .version import __version__

_compiler_config: Any = torch.compiler.config  # a config module; its stubs lack `patch`


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
    """A hash of what a compiled artifact depends on besides its graph: the options, this library's sources, the
    device's rates, the packages of other projects that the report names, and the rank of this process, as each rank's
    code contains the place of its keys among those of all ranks."""
    rank = (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
    return "mla:" + hashlib.sha256(repr((options, rates, packages, rank, _sources())).encode()).hexdigest()


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Within this context, torch's caches serve only artifacts that were made with this `tag`."""
    with _compiler_config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}{tag}"):
        yield


@contextlib.contextmanager
def own_artifacts(tag: str, use_cache: bool) -> Iterator[None]:
    """The same for graphs with ops of ours, which torch's caches then take; with `use_cache` off, they serve none."""
    cacheable = inductor_config.unsafe_marked_cacheable_functions | CACHEABLE
    with (
        tagged(tag),
        functorch_config.patch(enable_autograd_cache=functorch_config.enable_autograd_cache and use_cache),
        inductor_config.patch(unsafe_marked_cacheable_functions=cacheable),
    ):
        yield
