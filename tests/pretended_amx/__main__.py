"""Run pytest in a process in which AMX is emulated: python -m tests.pretended_amx tests/kernels -k bfloat16"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .pretend import NO_SYMBOLS, PLACES, places_of_cpuid

SOURCE = Path(__file__).with_name("tiles.c")


def main() -> int:
    places = " ".join(map(str, places_of_cpuid()))
    if not places:
        return NO_SYMBOLS
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "tiles.so"
        flags = ("-O2", "-mavx512f", "-fPIC", "-shared")
        subprocess.run([os.environ.get("CC", "cc"), *flags, SOURCE, "-o", library, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), PLACES: places}
        pytest = [sys.executable, "-m", "pytest", "-p", "tests.pretended_amx.plugin", *sys.argv[1:]]
        return subprocess.run(pytest, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
