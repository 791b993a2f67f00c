"""Every MLA family of transformers, unmodified: all attentions are rewritten, and logits are as right as eager's.

What the default run leaves out (a family's other attention implementations, caches and phases) is marked slow. The
table of `docs/families.md` says what becomes of each: every test here compares what it saw with its line.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from mla_compile.report import Report
from tests.errors import assert_as_close_as_eager
from tests.hf.families import (
    FAMILIES,
    HEADER,
    PHASES,
    VOCABULARY,
    Family,
    Watch,
    build,
    decoded,
    exact,
    interpreted,
    logits,
    merged,
    path_of,
    rewritten_attentions,
    some_ids,
    watched,
)

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
EVERY = [(f, a, c) for f in FAMILIES.values() for a in rewritten_attentions(f) for c in f.caches]


def table_of_the_page() -> dict[tuple[str, str], list[str]]:
    """The paths of each phase with a cache that grows, by family and attention implementation."""
    lines = PAGE.read_text().split(HEADER + "\n")[1].split("\n\n")[0].splitlines()[1:]
    table = {}
    for line in lines:
        family, attentions, *paths = (cell.strip() for cell in line.strip("|").split("|"))
        for attention in attentions.split("(")[1].rstrip(")").split(", "):
            table[family.strip("`"), attention.strip("`")] = paths
    return table


@pytest.fixture(autouse=True)
def on_any_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with the settings of its family, for the same device on every machine."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with interpreted(parameters.get("family", FAMILIES["youtu"])):
        yield


def test_the_page_lists_every_family() -> None:
    assert set(table_of_the_page()) == {(family.name, attention) for family, attention, _ in EVERY}


def taking_turns() -> list[tuple[Family, str, str]]:
    """Each family once, attention implementations and caches in turn; the two that have tests of their own left out."""
    turns = []
    for i, family in enumerate(f for f in FAMILIES.values() if f.name not in ("deepseek_v2", "deepseek_v3")):
        attentions = rewritten_attentions(family)
        turns.append((family, attentions[i // 2 % len(attentions)], family.caches[i % len(family.caches)]))
    return turns


def check_phases(family: Family, attention: str, cache: str, reports: dict[str, Report]) -> None:
    """All sites are rewritten; with a cache that grows, to what the page says."""
    expected = dict(zip(PHASES, table_of_the_page()[family.name, attention], strict=True))
    for phase, report in reports.items():
        assert len(report.sites) == report.rewritten == family.sites, report
        assert cache != "dynamic" or path_of(report) == expected[phase]


@pytest.mark.parametrize(("family", "attention", "cache"), taking_turns(), ids=lambda v: getattr(v, "name", v))
def test_a_decode_step_of_every_family(family: Family, attention: str, cache: str) -> None:
    model, ids = build(family, attention), some_ids()
    exactly, eager = decoded(exact(model), cache, ids), decoded(model, cache, ids)
    watch = Watch()
    model.compile(backend=watch)
    compiled = decoded(model, cache, ids)
    assert_as_close_as_eager(compiled, eager, exactly)
    check_phases(family, attention, cache, {"decode": merged(watch.ran)})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention", "cache"), EVERY, ids=lambda v: getattr(v, "name", v))
def test_every_phase_of_every_family(family: Family, attention: str, cache: str) -> None:
    model, ids = build(family, attention), some_ids()
    exactly, eager = logits(exact(model), cache, ids), logits(model, cache, ids)
    compiled, reports = watched(model, cache, ids)
    # All phases together: the largest of a few hundred errors says more than that of each call's hundred.
    assert_as_close_as_eager(*(torch.cat(phases, dim=1) for phases in (compiled, eager, exactly)))
    check_phases(family, attention, cache, dict(zip(PHASES, reports, strict=True)))


@pytest.mark.slow  # test_flex.py has one in every run
def test_functions_of_flex_attention_are_read() -> None:
    family, ids = FAMILIES["youtu"], some_ids()
    eager = build(family, "sdpa")  # flex_attention does not run uncompiled, nor in float64
    model, watch = build(family, "flex_attention"), Watch()
    model.compile(backend=watch)
    assert_as_close_as_eager(model(ids).logits, eager(ids).logits, exact(eager)(ids).logits)
    sites = merged(watch.ran).sites
    assert len(sites) == family.sites
    assert all(site.rewritten for site in sites)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_generation_with_left_padding_is_eagers_token_by_token(family: Family) -> None:
    model = build(family, family.attentions[0])
    ids = torch.randint(2, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    expected = copy.deepcopy(model).generate(ids, **options)
    watch = Watch()
    model.compile(backend=watch)
    assert torch.equal(model.generate(ids, **options), expected)
    assert all(site.rewritten for report in watch.ran for site in report.sites)
    assert sum(len(report.sites) for report in watch.ran) == 9 * family.sites
