"""Make torch and oneDNN in this process take the CPU for one with AMX; `tiles.c` must be loaded already."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

PLACES = "MLA_COMPILE_TESTS_CPUIDS"
"""The environment variable that passes on the result of `places_of_cpuid`, which takes seconds."""
NO_SYMBOLS = 70
"""The exit status where `places_of_cpuid` found nothing."""
LIBRARIES = Path(torch.__file__).parent / "lib"
ASKING = re.compile("Xbyak4util3Cpu|4dnnl4impl3cpu3x643amx")
"""Matches the symbols of oneDNN's functions that ask the CPU for its features."""
LONGEST = 4096
"""The most bytes of such a function."""
AMX_TILE = 0x32
"""The offset within `cpuinfo_isa` of the flag that there are tiles, which torch reads."""


def missing() -> str | None:
    """Why AMX cannot be emulated here, or need not be; None if it can."""
    if sys.platform != "linux" or not torch.cpu._is_avx512_bf16_supported():
        return "needs Linux and a CPU with AVX512-BF16"
    if torch.cpu._is_amx_tile_supported():
        return "this CPU has AMX"
    if torch.__version__ >= "2.15":
        return "torch 2.15 does not read from cpuinfo whether there are tiles"
    tools = [tool for tool in (os.environ.get("CC", "cc"), "nm", "objdump") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)}" if tools else None


def places_of_cpuid() -> list[int]:
    """Addresses in libtorch_cpu.so of the instructions by which oneDNN asks the CPU for its features.

    None are found where the library has no symbols.
    """
    library = str(LIBRARIES / "libtorch_cpu.so")
    functions = (line.split() for line in _read("nm", "--defined-only", library).splitlines() if ASKING.search(line))
    addresses = [int(at, 16) for at, kind, name in functions if kind in "tTwW" and not name.endswith(".cold")]
    if not addresses:
        return []
    span = f"--start-address={min(addresses)}", f"--stop-address={max(addresses) + LONGEST}"
    places, asks = [], False
    for line in _read("objdump", "-d", "--no-show-raw-insn", *span, library).splitlines():
        if line.endswith(">:"):
            asks = ASKING.search(line) is not None
        elif asks and line.endswith("\tcpuid"):
            places.append(int(line.partition(":")[0], 16))
    return places


def _read(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pretend() -> None:
    with open("/proc/self/maps") as maps:
        begins = next(int(line.partition("-")[0], 16) for line in maps if line.endswith("/libtorch_cpu.so\n"))
    places = [begins + int(place) for place in os.environ[PLACES].split()]
    failed = ctypes.CDLL(None).pretend_tiles((ctypes.c_void_p * len(places))(*places), len(places))
    assert not failed, f"oneDNN's code is not as expected ({failed})"
    library = ctypes.CDLL(str(LIBRARIES / "libc10.so"))
    library.cpuinfo_initialize()
    at = ctypes.addressof(ctypes.c_uint8.in_dll(library, "cpuinfo_isa"))
    ctypes.c_uint8.from_address(at + AMX_TILE).value = 1
    assert torch.cpu._is_amx_tile_supported()
    assert torch.cpu._init_amx()


def products_of_tiles() -> int:
    return ctypes.CDLL(None).products_of_tiles()
