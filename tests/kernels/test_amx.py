"""Products of bfloat16 on AMX: some tests of the kernels, run again in a process in which AMX is emulated."""

import os
import re
import subprocess
import sys

import pytest

from tests.pretended_amx.pretend import NO_SYMBOLS, missing

FILES = (
    "test_finite_products.py",
    "test_instruction_sets.py",
    "test_tiles.py",
    "triton/test_paged_expanded_attention.py",
)
CHOSEN = """
(test_finite_products and bfloat16 and not buffers and not dispatched)
or (test_instruction_sets and AMX-bfloat16 and not scaled and not byte)
or test_tiles
or (triton and test_half_precision and bfloat16)
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_kernels_with_tiles(request):
    folder = request.path.parent
    arguments = ["-q", "-n", "0", "-k", CHOSEN.replace("\n", " "), *(str(folder / name) for name in FILES)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended_amx", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    if done.returncode == NO_SYMBOLS:
        pytest.skip("this torch has no symbols of oneDNN's")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) products of tiles", done.stdout)[1]) > 1000
