"""The tests of the Triton kernels, `tests/kernels/triton`, without a GPU: in Triton's interpreter.

They need a process of their own, since Triton reads TRITON_INTERPRET when it is imported, and Inductor has imported it
in this one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, str(HERE / "triton")],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1]), done.stdout
