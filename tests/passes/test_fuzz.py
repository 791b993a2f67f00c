"""Programs that a seed composes keep their numbers: MLA under random masks, with random changes of its tensors, and
with some of them as inputs."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.check import KINDS, try_seeds

SEEDS = (*range(6), 20)
"""Few enough for every run; `python -m tests.fuzz masks --seeds 500` takes the time. 20 takes the path `values`."""
MORE = (range(6, 100), range(100, 200), range(200, 300))


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("masks", {"absorbed", "chunked", "sparse"}),
        ("tensors", {"absorbed", "chunked", "values", "unchanged"}),
        ("cuts", {"absorbed", "chunked"}),
    ],
)
def test_random_programs_keep_their_numbers(kind: str, paths: set[str]) -> None:
    tried = try_seeds(kind, SEEDS)
    assert not tried.wrong, "\n".join(tried.wrong)
    assert {*tried.paths} >= paths


@pytest.mark.slow
@pytest.mark.parametrize("seeds", MORE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_programs_keep_their_numbers(kind: str, seeds: range) -> None:
    tried = try_seeds(kind, seeds)
    assert not tried.wrong, "\n".join(tried.wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_known_by_its_seed(kind: str) -> None:
    """It makes the same choices whenever it is drawn and run: a wrong one is found again by its number."""
    first, again = KINDS[kind](7), KINDS[kind](7)
    result = first.function(*first.tensors)
    torch.testing.assert_close(first.function(*first.tensors), result, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(again.function(*again.tensors), result, rtol=0, atol=0, equal_nan=True)
