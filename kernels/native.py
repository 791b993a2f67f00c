"""C++ kernels for CPU, compiled at first use the way Inductor compiles the kernels that it generates.

Inductor finds the compiler, the flags for this CPU and OpenMP, and keeps the library on disk under a hash of all of
them. To emulate a machine that has only AVX2, set three variables that torch and Inductor read:
ATEN_CPU_CAPABILITY=avx2, TORCHINDUCTOR_CPP_MARCH=x86-64-v3 (either alone leaves AVX-512 to the compiler) and
ONEDNN_MAX_CPU_ISA=AVX2. The last one alone, AVX512_CORE_BF16, keeps `amx.h` from tiles.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from .progress import Progress

_log = logging.getLogger(__name__)

SETTINGS = {
    # Allows fused multiply-adds; Inductor forbids them by default, which halves the speed.
    "cpp.enable_floating_point_contract_flag": "fast",
    # None of the headers of Inductor's own kernels is used here, and compiling them takes seconds.
    "cpp_cache_precompile_headers": False,
}
"""Of Inductor, for these kernels."""
_HEADERS = "vector.h", "number.h", "line_products.h", "attend.h", "pairs.h", "amx.h", "tile_sums.h", "panels.h"
VECTOR, NUMBER, LINE_PRODUCTS, ATTEND, PAIRS, AMX, TILE_SUMS, PANELS = (
    Path(__file__).with_name(name) for name in _HEADERS
)
TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "i8",
    torch.uint8: "i4",
}
"""The name of each dtype in `number.h`; an element of uint8 holds two numbers of INT4."""

Recipe = tuple[tuple[Path, ...], tuple[str, ...], tuple[str, ...]]
"""The arguments of `load`."""


@dataclass(frozen=True)
class Kernels:
    """The C++ kernels of one op: the same files, compiled for several combinations of dtypes."""

    sources: tuple[Path, ...]
    argtypes: tuple[str, ...]
    macros: tuple[str, ...] = ("NUMBER",)
    """The macros that stand for the dtypes in the files, that of the queries first."""

    def of(self, *dtypes: torch.dtype) -> Callable[..., None] | None:
        """The kernel for some dtypes; None if there is none, or no compiler."""
        return load(*self.recipe(*dtypes)) if dtypes[0] in TYPES else None

    def begin(self, *dtypes: torch.dtype) -> None:
        """Start compiling in the background the kernel that `of` waits for."""
        if dtypes[0] in TYPES:
            start(*self.recipe(*dtypes))

    def recipe(self, *dtypes: torch.dtype) -> Recipe:
        """The arguments of `load` that build the kernel for some dtypes."""
        defines = (f"{macro} {TYPES[dtype]}" for macro, dtype in zip(self.macros, dtypes, strict=True))
        return self.sources, self.argtypes, tuple(defines)


def load(
    sources: tuple[Path, ...], argtypes: tuple[str, ...], defines: tuple[str, ...] = ()
) -> Callable[..., None] | None:
    """The function `kernel` of C++ files that are concatenated, headers first, or None where it cannot be built.

    Pointer arguments take tensors, the others numbers. Each of `defines` is a macro's name and value.
    """
    return start(sources, argtypes, defines)()


@cache
def start(
    sources: tuple[Path, ...], argtypes: tuple[str, ...], defines: tuple[str, ...] = ()
) -> Callable[[], Callable[..., None] | None]:
    """Start `load` in the background; the returned function waits for its result."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    text = text_of(sources, defines)
    return _built(sources[-1], lambda: CppPythonBindingsCodeCache.load_pybinding_async(list(argtypes), text, **_AWAY))


@cache
def start_library(sources: tuple[Path, ...]) -> Callable[[], ctypes.CDLL | None]:
    """Start compiling concatenated C++ files, which may use torch's headers, and loading them into this process.

    The returned function waits for the library.
    """
    return _built(sources[-1], lambda: _torch_library().load_async(text_of(sources, ()), **_AWAY))


def address(kernel: Callable[..., None]) -> int:
    """The address of a kernel's code."""
    found = ctypes.cast(_library_of(kernel).kernel, ctypes.c_void_p).value
    assert found is not None
    return found


@cache
def constant(kernel: Callable[..., None], name: str) -> int:
    """The value of an int64 constant that a kernel's library exports."""
    return ctypes.c_int64.in_dll(_library_of(kernel), name).value


def dtype_of_keys(kernel: Callable[..., None], queries: torch.dtype) -> torch.dtype:
    """The dtype of keys and values that a kernel for queries of a dtype requires, by `panels.h`."""
    return queries if constant(kernel, "bytes_of_a_key") == queries.itemsize else torch.float32


def _library_of(kernel: Callable[..., None]) -> ctypes.CDLL:
    assert isinstance(kernel, BuiltinFunctionType)
    assert isinstance(kernel.__self__, ModuleType)
    return ctypes.CDLL(kernel.__self__.__file__)


def text_of(sources: Sequence[Path], defines: Sequence[str]) -> str:
    """The text of one C++ file: the macros, then the sources."""
    return "\n".join([*(f"#define {define}" for define in defines), *(source.read_text() for source in sources)])


@cache
def _torch_library() -> Any:
    from torch._inductor.codecache import CppCodeCache

    flags = {"include_pytorch": True, "shared": True}
    return type("TorchLibrary", (CppCodeCache,), {"cache": {}, "cpp_compile_command_flags": flags})


def _built(source: Path, begin: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Call `begin` now; the returned function waits for its result, which is None where the build failed."""
    from torch._inductor import config

    def failed(error: Exception) -> None:
        _warn_once(f"{type(error).__name__}: {error}".splitlines()[0])
        _log.info("no native kernel from %s: %s", source, error)

    try:
        with config.patch(SETTINGS):
            pending = begin()
    except Exception as error:  # the compiler is missing, old or broken; ATen computes the same result
        failed(error)
        return lambda: None

    @cache
    def wait() -> Any:
        try:
            return pending()
        except Exception as error:
            failed(error)
            return None

    return wait


_WARNED = Event()


def _warn_once(why: str) -> None:
    if _WARNED.is_set():
        return
    _WARNED.set()
    _log.warning(
        "C++ kernels could not be compiled, so attention uses slower ATen operations (%s): is there a compiler that "
        "torch.compile finds ($CXX or g++)? TORCH_LOGS=+mla_compile shows the compiler's output.",
        why,
    )


_progress = Progress()
_AWAY: dict[str, Any] = {"submit_fn": _progress.submit}
