"""Compiled functions that are loaded in another process: by users (`aot_compile`), or by torch (`caching_precompile`).

Their code calls our ops, and that process need not know of us: what torch pickles of them imports this module first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch._inductor.output_code import OutputCode

import mla_compile.kernels.register  # noqa: F401  registers the kernels of the ops
from mla_compile.kernels import compiled as cpp_kernels


@dataclass(frozen=True)
class Saved:
    """What torch made of a compiled function to pickle it, and the dtypes whose C++ kernels its code calls."""

    artifact: Any
    dtypes: tuple[torch.dtype, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return loaded, (self.artifact, self.dtypes)


def loaded(artifact: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Return an artifact in a process where its code can run."""
    cpp_kernels.make_ready(dtypes)
    return artifact


class Registration:
    """A part of code that torch pickles by itself. To unpickle it is to import this module."""

    def __reduce__(self) -> tuple[Callable[[], Registration], tuple[()]]:
        return Registration, ()


def registering(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's `compile` of graphs with our ops, which are registered wherever its code is unpickled."""

    @wraps(compile)
    def compiling(*arguments: Any, **kwargs: Any) -> Any:
        code = compile(*arguments, **kwargs)
        if isinstance(code, OutputCode):
            code.registration = Registration()  # type: ignore[attr-defined]
        return code

    return compiling


def saved_with_kernels(compiled: Callable[..., Any], dtypes: Iterable[torch.dtype] = ()) -> Callable[..., Any]:
    """`compiled`, after whose loading our ops are registered, and C++ kernels for these dtypes are ready."""
    serialize = getattr(compiled, "serialize", None)
    if serialize is not None:  # torch makes it where a function may be saved
        compiled.serialize = lambda: Saved(serialize(), tuple(dtypes))  # type: ignore[attr-defined]
    return compiled
