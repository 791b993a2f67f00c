"""Ops as launches that Inductor makes: its code for a GPU, run by Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="torch has a CUDA of its own")

ROOT = Path(__file__).parents[1]
LAUNCHES = {
    "paged": ["attend_latents_0", "combine_1"],
    "paged_fp8": ["attend_latents_0", "combine_1"],
    "rows": ["attend_latents_0"],
    "masked": ["attend_latents_0"],
    "named": ["attend_latents_0"],
    "merged": ["merge_0"],
    "product": [],
}
MOST = 4.0
"""Of what rounding explains: the bound of the kernels' own tests in float32."""


def step(command, folder, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fake_cuda.written", command, str(folder)],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    step("write", folder)
    for code in folder.glob("*.py"):
        assert "torch.ops.mla" not in code.read_text().partition("def call(")[2]
    return json.loads(step("run", folder, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_inductor_launches_gives_the_numbers_of_the_op(name, found):
    launches, error = found[name]
    assert launches == LAUNCHES[name]
    assert error < MOST
