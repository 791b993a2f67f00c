"""Packages of lowered programs, each in a process of its own: none crashes, and all are right against float64."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lowered.choices import Program, draw, sizes
from tests.lowered.processes import outcomes
from tests.lowered.run import read_twice

PROGRAMS = range(12)
"""Few enough for `-m slow`; `python -m tests.lowered --programs 200` takes the time."""
ONE_SEQUENCE = Program(
    *(0, "chunked", "grown", "causal", "together", "sdpa", 1, torch.float32),
    *(4, 48, 24, 8, 24, 64),
    *((1, 1), (2, 2048), (2, 4096)),
)
"""Its latents are chains of views that end with the layout of the tensor. AOTInductor would read these after it freed
them, if a loop got them."""

PAGES_IN_FP8 = Program(
    *(0, "chunked", "fp8 pages", "causal lengths", "together", "sdpa", 1, torch.float32),
    *(2, 8, 4, 8, 8, 16),
    *((2, 2), (1, 9), (2, 16)),
)
"""Its pages go to the loop as bytes, a view as another dtype."""


def wrong(*programs: Program) -> list[str]:
    return [f"{program}: {trouble}" for program, trouble in outcomes(programs, 2) if trouble]


@pytest.mark.slow
def test_a_loop_over_the_keys_of_one_sequence() -> None:
    assert not wrong(ONE_SEQUENCE)


@pytest.mark.slow
def test_a_loop_over_pages_in_fp8() -> None:
    assert not wrong(PAGES_IN_FP8)


@pytest.mark.slow
def test_programs_of_seeds() -> None:
    assert not wrong(*map(draw, PROGRAMS))


def test_what_ends_a_process_is_said() -> None:
    program = replace(draw(0), rank=-1)
    (said,) = wrong(program)
    assert "RuntimeError" in said
    assert said.endswith(")")


def test_the_edges_of_the_ranges_are_among_the_sizes() -> None:
    for seed in range(100):
        program = draw(seed)
        for axis, span in enumerate((program.batch, program.queries)):
            assert {size[axis] for size in sizes(program)} >= set(span), program


def test_a_handle_that_a_loop_reads_twice_is_seen(tmp_path: Path) -> None:
    package = str(tmp_path / "a.pt2")
    line = "aoti_torch_assign_tensors_out(RAIIAtenTensorHandle({}), &while_loop_{}_graph_0_arg8_1_handle);\n"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("a.wrapper.cpp", line.format("tmp_1", "cond") + line.format("tmp_1", "body"))
    assert read_twice(package) == ["tmp_1"]
