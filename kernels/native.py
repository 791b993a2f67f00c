"""C++ kernels for CPU: compiled at their first use, the way Inductor compiles the ones it generates.

That finds the compiler, the flags of this CPU and OpenMP, and keeps the library on disk under a hash of all of them.
A machine plays one with AVX2 alone by three variables that torch and Inductor read: ATEN_CPU_CAPABILITY=avx2,
TORCHINDUCTOR_CPP_MARCH=x86-64-v3 (either alone leaves AVX-512 to the compiler) and ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


_CONFIG = {
    # Products are added unrounded; Inductor keeps the two apart by default, which halves the speed.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Of the headers of Inductor's own kernels none is used here, and compiling them takes seconds.
    "cpp_cache_precompile_headers": False,
}


VECTOR, ATTEND, NUMBER = (Path(__file__).with_name(name) for name in ("vector.h", "attend.h", "number.h"))
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}
"""What `number.h` calls a dtype."""


@cache
def load(
    sources: tuple[Path, ...], argtypes: tuple[str, ...], defines: tuple[str, ...] = ()
) -> Callable[..., None] | None:
    """The function `kernel` of C++ files taken as one, headers first: pointers take tensors, the rest numbers.

    `defines` are macros, a name and what it stands for. None where it cannot be built.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    try:
        with config.patch(_CONFIG):
            macros = [f"#define {define}" for define in defines]
            text = "\n".join([*macros, *(source.read_text() for source in sources)])
            return CppPythonBindingsCodeCache.load_pybinding(list(argtypes), text)
    except Exception as error:  # a compiler that is missing, old or broken: there is another way to the same result
        _log.info("no native kernel from %s: %s", sources[-1], error)
        return None
