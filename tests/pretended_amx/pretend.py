"""Has this process's torch believe in AMX; `tiles.c` has to be in it already."""

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
"""The variable of the environment for what `places_of_cpuid` gave: it takes seconds."""
NO_SYMBOLS = 70
"""The exit status where `places_of_cpuid` found nothing."""
LIBRARIES = Path(torch.__file__).parent / "lib"
ASKING = re.compile("Xbyak4util3Cpu|4dnnl4impl3cpu3x643amx")
"""The functions of oneDNN that ask the CPU what it has, by their symbols."""
LONGEST = 4096
"""Bytes of such a function, at most."""
AMX_TILE = 0x32
"""Where `cpuinfo_isa` keeps whether there are tiles, which torch asks."""


def missing() -> str | None:
    """Why it can't be pretended here, or need not be."""
    if sys.platform != "linux" or not torch.cpu._is_avx512_bf16_supported():
        return "needs Linux and a CPU with AVX512-BF16"
    if torch.cpu._is_amx_tile_supported():
        return "this CPU has AMX"
    tools = [tool for tool in (os.environ.get("CC", "cc"), "nm", "objdump") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)}" if tools else None


def places_of_cpuid() -> list[int]:
    """Where the instructions are in libtorch_cpu.so by which oneDNN asks the CPU what it has; none where it has no
    symbols."""
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
