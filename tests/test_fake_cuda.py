"""Whole models as an H100 would run them: what is launched, copied and allocated, and whether CUDA graphs are taken.

Nothing runs and nothing is timed: what is counted is in the code that Inductor writes. Each count is a ceiling.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from tests.fake_cuda.cases import Case
from tests.fake_cuda.lowering import Lowered
from tests.kernels.ahead import CUOBJDUMP, compile_attention, compile_written

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or torch.version.hip is not None, reason="there is a GPU, or torch takes AMD's for one"
)

ROOT = Path(__file__).parents[1]
SECONDS = 900
"""The time limit of a process, enough for a busy machine."""

LAUNCHES = {
    Case("v3", "static", 64, 1): 16,
    Case("v3", "pages", 1, 1): 16,
    Case("v3", "static", 1, 1): 17,
    Case("v3", "pages", 64, 1): 16,
    Case("v3", "fp8 pages", 64, 1): 17,
    Case("v3", "fp8 pages", 1, 1): 17,
    Case("v3", "fixed pages", 64, 1): 16,
    Case("v3", "fixed pages", 1, 1): 16,
    Case("v3", "dynamic", 64, 1): 16,
    Case("v3", "dynamic", 1, 1): 16,
    Case("v3", "static", 4, 4): 16,
    Case("v3", "pages", 4, 4): 16,
    Case("v3", "dynamic", 4, 4): 16,
    Case("v3", "static", 1, 512): 53,
    Case("v3", "pages", 1, 512): 38,
    Case("v3", "dynamic", 1, 512): 33,
    Case("v3", "pages", 1, 1, frozen=True): 14,
    Case("v3", "dynamic", 64, 1, frozen=True): 14,
    Case("v3", "fp8 pages", 64, 1, frozen=True): 15,
    Case("v2-lite", "static", 1, 1): 15,
    Case("v2-lite", "pages", 1, 1): 15,
    Case("v2-lite", "pages", 64, 1): 15,
    Case("v2-lite", "fp8 pages", 1, 1): 16,
}
"""The most kernels, library calls and copies that one more layer adds."""
ALWAYS = [Case("v3", "pages", 1, 1)]
EXAMPLE = Case("examples/paged.py", "pages", 3, 1, layers=1)
RECORDED = Case("v3", "static", 2, 1, layers=1, recorded=True)
COMPLEX = Case("v2-lite", "static", 1, 1, layers=1)
SAID = ("paged_latent_attention", "expanded_attention")
"""Ops for which a report names the kernel that would run."""
WORKSPACE = 64 << 20
"""Bytes: what a chunk of a prefill is expanded to. The caches of 64 sequences take 576 MiB a layer."""


def lowered(cases: Sequence[Case], gpu: str = "h100") -> list[Lowered]:
    """What a process that is made to believe in a GPU finds for each case."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda", gpu, *(json.dumps(dataclasses.asdict(case)) for case in cases)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [Lowered(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def always() -> dict[Case, Lowered]:
    """Each case with one layer and with two, in one process: importing torch takes most of the time of a process."""
    both = [dataclasses.replace(case, layers=layers) for case in ALWAYS for layers in (1, 2)]
    cases = [*both, EXAMPLE, RECORDED, COMPLEX]
    return dict(zip(cases, lowered(cases), strict=True))


def check(one: Lowered, two: Lowered, case: Case) -> None:
    """Check what two layers launch and allocate, and what the second one adds."""
    print(f"{case.name}\n  " + "\n  ".join(two.launches))  # what there is to save, with -s
    assert two.paths == ["chunked" if case.tokens > 4 else "absorbed"] * 2
    assert len(two.launches) - len(one.launches) <= LAUNCHES[case]
    assert (two.moving, two.no_graphs) == ([], "")
    assert {line.partition(": ")[0] for line in two.kernels} == {f"mla::{op}" for op in two.ops if op in SAID}
    assert not [name for name in two.launches if name.partition(": ")[2] in ("copy_", "clone", "contiguous")]
    if case.tokens <= 4:  # Inductor launches all, and calls no op
        assert two.host_calls == {}
        assert sum(name.startswith("attend_latents_") for name in two.launches) == 2
    if case.cache != "dynamic":  # a dynamic one is copied with each token
        assert max(two.buffers) <= WORKSPACE


@pytest.mark.parametrize("case", ALWAYS, ids=lambda case: case.name)
def test_a_step(case: Case, always: dict[Case, Lowered]) -> None:
    check(*(always[dataclasses.replace(case, layers=layers)] for layers in (1, 2)), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LAUNCHES if case not in ALWAYS], ids=lambda case: case.name)
def test_a_step_of_other_sizes(case: Case) -> None:
    check(*lowered([dataclasses.replace(case, layers=layers) for layers in (1, 2)]), case)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
def test_a_step_of_a_cache_that_grows(batch: int) -> None:
    """Compiled once for any length: Inductor launches all, and the host plans nothing anew."""
    case = Case("v3", "dynamic", batch, 1, any_size=True)
    one, two = lowered([dataclasses.replace(case, layers=layers) for layers in (1, 2)])
    assert two.paths == ["absorbed"] * 2
    assert two.host_calls == {}
    assert sum(name.startswith("attend_latents_") for name in two.launches) == 2
    assert len(two.launches) - len(one.launches) <= LAUNCHES[dataclasses.replace(case, layers=2, any_size=False)]


@pytest.mark.slow
def test_a_step_of_several_queries_over_pages_of_any_size() -> None:
    """Pages are read where they are, and Inductor launches what reads them, even if all sizes are symbols."""
    (step,) = lowered([Case("v3", "pages", 4, 4, layers=1, any_size=True)])
    assert step.host_calls == {}
    assert step.ops.count("paged_latent_attention") == 1
    assert sum(name.startswith("attend_latents_") for name in step.launches) == 1


@pytest.mark.slow
def test_fp8_pages_on_a_gpu_without_fp8() -> None:
    """Inductor generates no e4m3 for it: torch itself converts and writes, in place."""
    case = Case("v3", "fp8 pages", 64, 1, layers=1)
    (found,) = lowered([case], "a100")
    assert (found.paths, found.moving, found.no_graphs) == (["absorbed"], [], "")
    assert "aten.index_put_.default" in found.launches
    assert max(found.buffers) <= WORKSPACE


def test_cuda_graphs_have_the_warp_groups(always: dict[Case, Lowered]) -> None:
    """Three launches from Python cost nothing in a replay; without one, Inductor launches the Triton kernel."""
    found = always[RECORDED]
    assert (found.paths, found.moving, found.no_graphs) == (["absorbed"], [], "")
    assert [line.partition(";")[0] for line in found.kernels] == ["mla::paged_latent_attention: Gluon"]
    of_op = [name for name in found.launches if name.startswith("paged_latent_attention: ")]
    assert of_op == ["paged_latent_attention: attend_latents", "paged_latent_attention: combine"]  # ours are recorded
    assert len(found.launches) - len(of_op) <= 18  # as many as beside launches by Inductor; torch 2.11 has 2 more
    (line,) = always[dataclasses.replace(ALWAYS[0], layers=1)].kernels
    assert "Gluon is launched from Python, which pays in a CUDA graph" in line


def test_a_rope_with_complex_factors_is_one_with_what_is_around_it(always: dict[Case, Lowered]) -> None:
    launches = always[COMPLEX].launches
    assert not [name for name in launches if name.startswith("aten.")]
    attention = launches.index("attend_latents_0")
    assert len(launches[:attention]) <= 6, launches  # a norm, two products, a norm, the ropes and writes, W_UK


def test_the_example_with_pages(always: dict[Case, Lowered]) -> None:
    found = always[EXAMPLE]
    assert (found.paths, found.moving, found.no_graphs) == (["absorbed"], [], "")
    assert found.ops.count("paged_latent_attention") == 1
    assert found.host_calls == {}
    assert set(found.written) == {"attend_latents_0", "combine_1"}


@pytest.mark.parametrize("name", ["attend_latents_0", "combine_1"])
def test_the_machine_code_of_what_inductor_launches(name: str, always: dict[Case, Lowered], tmp_path: Path) -> None:
    """As good as that of what the op launches: no more stack, and no float64, which Inductor passes numbers as."""
    if not CUOBJDUMP.exists():
        pytest.skip("Triton's package carries no cuobjdump here")
    record = compile_written("sm_90", always[dataclasses.replace(ALWAYS[0], layers=1)].written[name], tmp_path / "k.py")
    assert not re.search(r"\b(add|mul|fma|div)\.(rn\.)?f64", record.assembly)
    if name.startswith("attend"):
        decode = compile_attention("sm_90", 128)
        counted = ("HGMMA", "LDGSTS")
        assert [record.loop[each] for each in counted] == [decode.loop[each] for each in counted]
        assert record.shared == decode.shared
        assert record.stack <= decode.stack
    else:
        assert record.stack == 0


def test_this_process_still_sees_no_gpu(always: dict[Case, Lowered]) -> None:
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|no NVIDIA driver"):
        torch.empty(1, device="cuda")
