"""C++ kernels for CPU: compiled at their first use, the way Inductor compiles the ones it generates.

That finds the compiler, the flags of this CPU and OpenMP, and keeps the library on disk under a hash of all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)


_CONFIG = {
    # Products are added unrounded; Inductor keeps the two apart by default, which halves the speed.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Of the headers of Inductor's own kernels none is used here, and compiling them takes seconds.
    "cpp_cache_precompile_headers": False,
}


@cache
def load(source: Path, argtypes: tuple[str, ...]) -> Callable[..., None] | None:
    """The function `kernel` of a C++ file: pointers take tensors, the rest numbers. None where it cannot be built."""
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    try:
        with config.patch(_CONFIG):
            return CppPythonBindingsCodeCache.load_pybinding(list(argtypes), source.read_text())
    except Exception as error:  # a compiler that is missing, old or broken: there is another way to the same result
        _log.info("no native kernel from %s: %s", source, error)
        return None
