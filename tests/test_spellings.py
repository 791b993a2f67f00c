"""Modules that a seed composes: MLA is rewritten and right, however it is written; what is no MLA stays as it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla_compile import last_report
from tests.errors import assert_as_close_as_eager
from tests.spellings.checks import check, copies, made
from tests.spellings.choices import CHOICES, OWN_ROPES, SPOILERS, TWO_LATENTS, Spelling, draw
from tests.spellings.training import check_training

SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))]
"""Few enough for every run; `python -m tests.spellings --seeds 2000` takes the time."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spelling_is_rewritten_and_right(seed: int) -> None:
    spelling = draw(seed)
    outcome = check(spelling, seed)
    assert outcome.rewritten == spelling.is_rewritten, outcome.reason


# 22, 58 and 93 return their weights, 26 has a gate and a loop over heads, 57 and 61 a gate of groups of heads.
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12)), 22, 26, 57, 58, 61, 93]
)
def test_a_spelling_is_trained(seed: int) -> None:
    spelling = draw(seed)
    outcome = check_training(spelling, seed)
    assert outcome.rewritten == spelling.is_rewritten, outcome.reason


@pytest.mark.parametrize("spoiled", SPOILERS)
def test_a_spoiled_spelling_is_trained_as_it_is(spoiled: str) -> None:
    assert check_training(Spelling(spoiled=spoiled), seed=0).path == "unchanged"


@pytest.mark.parametrize("spoiled", OWN_ROPES + TWO_LATENTS)
def test_other_kinds_of_mla_are_trained(spoiled: str) -> None:
    assert check_training(Spelling(spoiled=spoiled), seed=0).path == "chunked"


@pytest.mark.parametrize("spoiled", SPOILERS)
def test_a_spoiled_spelling_stays_as_it_is(spoiled: str) -> None:
    outcome = check(Spelling(spoiled=spoiled), seed=0)
    assert outcome.path == "unchanged"
    assert outcome.reason.startswith("expected ")


@pytest.mark.parametrize("spoiled", OWN_ROPES + TWO_LATENTS)
def test_few_queries_attend_to_latents(spoiled: str) -> None:
    assert check(Spelling(spoiled=spoiled), seed=0).path == "absorbed"


def test_one_query_whose_weights_are_returned_is_absorbed_whatever_is_asked_for() -> None:
    """As many products are left as the absorbed path leaves: those of the loop over heads stay."""
    s = Spelling(absorbed="values", softmax="plain", scale="query", returned=True, loop="heads", cache="cat", queries=1)
    assert check(s, seed=0).path == "absorbed"


def test_groups_whose_heads_serve_several_queries_are_gated_and_scaled() -> None:
    """The factor of a group is one of heads that are repeated before they are multiplied by a number."""
    grouped = Spelling(latents="groups", heads=4, groups="repeat_interleave", gated=True)
    outcome = check(dataclasses.replace(grouped, scale="key", softmax="plain", keys="two scores"), seed=0)
    assert outcome.rewritten, outcome.reason


def test_every_choice_is_drawn() -> None:
    """Otherwise the rate that `python -m tests.spellings` prints would not cover every choice."""
    drawn = [draw(seed) for seed in range(1000)]
    for field in dataclasses.fields(Spelling):
        made_of = {getattr(spelling, field.name) for spelling in drawn}
        listed = {"no", *SPOILERS, *OWN_ROPES, *TWO_LATENTS} if field.name == "spoiled" else {*CHOICES[field.name]}
        assert made_of == listed | ({*CHOICES["half"]} if field.name == "dtype" else set())


def test_a_buffer_may_be_written_at_borders_that_no_column_has() -> None:
    """Keys stand before values in one product: what is left of it behind the keys of two heads is no number of keys."""
    s = Spelling(bias=True, weights="keys before values", keys="pad", padded="buffer", heads=4, value=5)
    assert check(s, seed=0).rewritten


@pytest.mark.parametrize("seed", [0, 7, 25, 40])
def test_a_spelling_through_torch_compile(seed: int, without_codegen: None) -> None:
    """Compared over several inputs: for one, eager's error may be small by chance."""
    spelling = draw(seed)
    module, _ = made(spelling, seed)
    inputs = [made(spelling, seed + i)[1] for i in range(8)]
    eager = torch.stack([module(*copies(tensors)) for tensors in inputs])
    compiled = torch.compile(module, backend="mla", options={"mla.path": "absorbed"}, fullgraph=True)
    results = torch.stack([compiled(*copies(tensors)) for tensors in inputs])
    assert last_report().rewritten == 1
    module.double()
    exact = torch.stack([module(*copies(tensors, torch.float64)) for tensors in inputs])
    assert_as_close_as_eager(results, eager, exact)
