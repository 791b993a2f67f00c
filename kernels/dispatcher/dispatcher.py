"""Choose who computes an op on CPU: at first its general implementation in Python, after `take_over` `dispatcher.cpp`.

`dispatcher.cpp` calls the kernels that were provided, and for everything else the general implementation, through an op
of its own. Before that, and on a machine without a compiler, torch calls the general implementation itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mla_compile.ops import schema_of

from ..native import TYPES, address, start_library

_HERE = Path(__file__).parent
SOURCES = (
    _HERE.parent / "latent_attention" / "call.h",
    _HERE.parent / "expanded_attention" / "call.h",
    _HERE.parent / "per_head_matmul" / "call.h",
    _HERE.parent / "widened_matmul" / "call.h",
    *(_HERE / f"{name}.h" for name in ("common", "cached", "visible", "expanded_attention", "many_queries")),
    *(_HERE / f"{name}.h" for name in ("latent_attention", "paged_keys", "paged_latent_attention")),
    *(_HERE / f"{name}.h" for name in ("sparse_latent_attention", "paged_expanded_attention")),
    *(_HERE / f"{name}.h" for name in ("per_head_matmul", "merge_states", "append_latents")),
    *(_HERE / f"{name}.h" for name in ("widened_matmul", "used_again", "grow_cache", "gradients")),
    _HERE / "dispatcher.cpp",
)
PLACES = list(TYPES)
"""The dtypes in the order of `place` in `common.h`."""
_GENERAL = torch.library.Library("mla", "FRAGMENT")
_implementations: dict[str, Callable[..., Any]] = {}
_registered: list[torch.library.Library] = []
"""The registrations of the general implementations for their ops, which last as long as these objects."""
_CPP_IS_THERE = torch._C._dispatch_has_kernel_for_dispatch_key("mla::latent_attention", "CPU")
"""Whether a library built by `kernels/library.py` was loaded before; if so, it goes on computing the ops."""


def general(op: str) -> Callable[[Callable[..., Any]], None]:
    """Return a function that registers an implementation of everything that `mla::<op>` takes on CPU."""

    def register(implementation: Callable[..., Any]) -> None:
        _GENERAL.define(f"{op}_general{schema_of(op)}")
        _GENERAL.impl(f"{op}_general", implementation, "CPU")
        _implementations[op] = implementation
        _register(op)

    return register


def _register(op: str) -> None:
    if _CPP_IS_THERE:
        return
    library = torch.library.Library("mla", "IMPL")
    library.impl(op, _implementations[op], "CPU")
    _registered.append(library)


def begin() -> None:
    """Start compiling in the background what `take_over` waits for."""
    if not _CPP_IS_THERE:
        start_library(SOURCES)


@cache
def take_over() -> ctypes.CDLL | None:
    """Let torch call the C++ from now on. Not to be called while an op runs. None where it cannot be built."""
    if _CPP_IS_THERE:
        return None
    waiting = start_library(SOURCES)
    # Unregister first, because torch warns of an implementation that replaces another.
    while _registered:
        _registered.pop()._destroy()
    library = waiting()
    if library is None:
        for op in _implementations:
            _register(op)
    return library


def provide(op: str, dtypes: Sequence[torch.dtype], kernel: Callable[..., None] | None) -> None:
    """Hand a kernel of an op, for tensors of these dtypes, to the C++, which takes over; None takes the kernel back."""
    library = take_over()
    if library is None:
        return
    where = [ctypes.c_int64(PLACES.index(dtype)) for dtype in dtypes]
    getattr(library, f"provide_{op}")(*where, ctypes.c_void_p(None if kernel is None else address(kernel)))
