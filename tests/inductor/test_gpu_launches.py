"""Ops whose kernels Inductor launches itself: its code for a GPU, run by Triton's interpreter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

pytest.importorskip("triton")

from mla_compile.kernels._common.combine import combine
from mla_compile.kernels._common.kernel import attend_latents
from mla_compile.kernels.merge_states.kernel import merge

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or torch.version.hip is not None, reason="there is a GPU, or torch takes AMD's for one"
)

ROOT = Path(__file__).parents[2]
LAUNCHES = {
    "paged": ["attend_latents_0", "combine_1"],
    "paged_fp8": ["attend_latents_0", "combine_1"],
    "one_page": ["attend_latents_0", "combine_1"],
    "rows": ["attend_latents_0"],
    "masked": ["attend_latents_0"],
    "named": ["attend_latents_0"],
    "merged": ["merge_0"],
    "step": ["triton_per_fused_0", "triton_poi_fused_1", "attend_latents_0", "combine_1"],
    "product": [],
    "paged_of_any_size": ["attend_latents_0", "combine_1"],
    "paged_fp8_of_any_size": ["attend_latents_0", "combine_1"],
    "one_page_of_any_size": ["attend_latents_0", "combine_1"],
    "rows_of_any_size": ["attend_latents_0", "combine_1"],
    "masked_of_any_size": ["attend_latents_0", "combine_1"],
    "named_of_any_size": ["attend_latents_0"],
    "merged_of_any_size": ["merge_0"],
}
"""Those of any size are traced with few sequences and keys, and run with more."""
SLOW = ("paged_fp8", "one_page", "rows", "masked", "named", "rows_of_any_size", "merged_of_any_size")
"""Each op is launched by default with sizes that are known or with symbols, and attention over pages with both."""
SOME = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAUNCHES]
MOST = 4.0
"""The largest error, in units of what float32 sums may be off by (`_error` in `tests/fake_cuda/written.py`)."""


def step(command, folder, *names, module="written", **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.fake_cuda.{module}", command, str(folder), *names],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def names(request):
    """The cases of the tests that run."""
    of_tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return sorted({item.callspec.params["name"] for item in of_tests if "name" in item.callspec.params})


@pytest.fixture(scope="module")
def written(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    step("write", folder, *names)
    return folder


@pytest.fixture(scope="module")
def found(names, written):
    return json.loads(step("run", written, *names, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", SOME)
def test_what_inductor_launches_gives_the_numbers_of_the_op(name, written, found):
    launches, error = found[name]
    assert "torch.ops.mla" not in (written / f"{name}.py").read_text().partition("def call(")[2]
    assert launches == LAUNCHES[name]
    assert error < MOST


@pytest.mark.parametrize("name", SOME)
def test_it_launches_from_cpp_too(name, written):
    if not (written / f"{name}.cpp").exists():
        pytest.skip("this torch asks a GPU for kernels before it writes C++")
    code = (written / f"{name}.cpp").read_text()
    called = re.findall(r"^    (?:call_(\w+_\d)\(|.*aoti_torch_cuda_(\w+)_out\()", code, re.M)
    assert [kernel or library for kernel, library in called] == (LAUNCHES[name] or ["bmm"])
    assert "mla::" not in code


def test_a_lowered_program_launches(written):
    ops = (written / "exported.txt").read_text().split()
    assert ops.count("triton_kernel_wrapper_functional") == 2
    assert not {op for op in ops if op.startswith("aten.")} - {"aten.slice.Tensor", "aten.empty.memory_format"}


@pytest.mark.parametrize("kernel", [attend_latents, combine, merge], ids=lambda kernel: kernel.__name__)
def test_every_version_of_torch_can_write_the_source(kernel):
    """torch 2.11 puts the source into a literal, in which it escapes nothing."""
    assert "\\" not in user_defined_triton_kernel_transitive_closure_source_code(kernel)


@pytest.mark.slow
def test_a_step_of_a_model_gives_the_numbers_of_its_graph(tmp_path):
    """With kernels that are merged, rows that are written in parts, and the layers around the attention."""
    from tests.fake_cuda.whole import CACHES, LAYERS, SIZES

    step("write", tmp_path, module="whole")
    errors = json.loads(step("run", tmp_path, module="whole", TRITON_INTERPRET="1"))
    assert errors.keys() == CACHES.keys()
    # Nine products a layer, one after the other, of at most so many numbers, each rounded to float32.
    assert max(errors.values()) < torch.finfo(torch.float32).eps * (LAYERS * 9 * SIZES["intermediate_size"]) ** 0.5
