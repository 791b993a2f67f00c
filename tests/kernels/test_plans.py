"""Launchers keep their plans for further calls with the same shapes, strides and dtypes."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels._common import launch, tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.expanded_attention import triton as chunked
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention
from mla_compile.kernels.expanded_attention.triton import expanded_attention_triton
from mla_compile.kernels.paged_expanded_attention import triton as gathered
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_expanded_attention.triton import paged_expanded_attention_triton
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton

from .recorded import made

L, R = 32, 16
H100 = Machine("sm_90", 132)


def bundle(**changes):
    pages = made(9, 16, L + R)
    q = made(2, 1, 4, L), made(2, 1, 4, R)
    numbers = made(2, 8, dtype=torch.int32), made(2, dtype=torch.int32)
    given = PagedLatentAttention(*q, pages[..., :L], pages[..., L:], *numbers, True, 0.1)
    return dataclasses.replace(given, **changes)


@pytest.fixture
def plans(monkeypatch):
    """The plans of the launcher, none at first."""
    own = Plans()
    monkeypatch.setattr(launch, "PLANS", own)
    return own


def test_a_second_call_makes_no_plan_and_launches_the_same(plans, launches, monkeypatch):
    paged_latent_attention_triton(bundle(), H100)
    first, launches[:] = list(launches), []
    assert len(plans) == 1
    monkeypatch.setattr(launch, "_new_plan", None)
    paged_latent_attention_triton(bundle(scale=0.2), H100)
    assert len(first) == len(launches) == 2
    for one, other in zip(first, launches, strict=True):
        assert (one.kernel, one.grid, one.constants) == (other.kernel, other.grid, other.constants)
        numbers = [[a for a in launch.arguments if isinstance(a, int)] for launch in (one, other)]
        assert numbers[0] == numbers[1]
    assert [a for a in launches[0].arguments if isinstance(a, float)] == [0.2]


OTHERS = {
    "a longer table": {"block_table": made(2, 9, dtype=torch.int32)},
    "strides of queries": {"q_latent": made(2, 4, 1, L).transpose(1, 2)},
    "strides of pages": {"latent_pages": made(9, 16, L + R + 8)[..., :L]},
    "a dtype of numbers": {"block_table": made(2, 8, dtype=torch.int64)},
    "a mask": {"mask": made(2, 1, 1, 128, dtype=torch.bool)},
    "no causal limit": {"causal": False},
    "fixed parts": {"split_tokens": 32},
    "first positions": {"first_positions": made(2, dtype=torch.int32)},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_what_a_launch_depends_on_makes_another(plans, launches, change):
    paged_latent_attention_triton(bundle(), H100)
    paged_latent_attention_triton(bundle(**change), H100)
    assert len(plans) == 2
    fresh = [(launch.grid, launch.constants) for launch in launches[2:]]
    plans._known.clear()
    launches.clear()
    paged_latent_attention_triton(bundle(**change), H100)
    assert [(launch.grid, launch.constants) for launch in launches] == fresh


def test_another_machine_and_other_tiles_make_another(plans, launches):
    for machine, tiles in ((H100, None), (Machine("sm_80", 108), None), (H100, Tiles(16, 16, 4, 2))):
        paged_latent_attention_triton(bundle(), machine, tiles)
    assert len(plans) == 3
    assert launches[-2].constants["KEYS"] == 16


def test_tiles_that_were_measured_are_not_what_is_kept_for_calls_that_do_not_ask(
    plans, launches, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_KNOWN", {})
    monkeypatch.setattr(tuning, "difference", lambda *_: None)  # recorded launches have no results
    paged_latent_attention_triton(bundle(), H100)
    table = launches[0].constants
    seconds = iter(range(1000, 0, -1))  # the last is the fastest
    with tuning.tuning(lambda run: (run(), next(seconds))[1]):
        paged_latent_attention_triton(bundle(), H100)
    assert launches[-2].constants != table
    paged_latent_attention_triton(bundle(), H100)
    assert launches[-2].constants == table


def test_there_are_never_more_than_so_many():
    plans, calls = Plans(most=3), []

    def make(i):
        calls.append(i)
        return i

    for i in (1, 2, 3, 1, 4, 1, 2):
        assert plans.get(i, lambda i=i: make(i)) == i
        assert len(plans) <= 3
    assert calls == [1, 2, 3, 4, 1, 2]


def prompt(**changes):
    """A prefill of 40 queries, the last of 96 tokens, whose keys are expanded in several chunks."""
    given = ExpandedAttention(
        q=made(1, 40, 4, 24 + R),
        latent=made(1, 96, L),
        k_rope=made(1, 96, R),
        w_uk=made(4, 24, L),
        w_uv=made(4, 8, L),
        mask=None,
        causal_offset=56,
        scale=0.1,
        workspace_tokens=12,
    )
    return dataclasses.replace(given, **changes)


def paged_prompt(**changes):
    pages, numbers = made(9, 16, L + R), (made(2, 8, dtype=torch.int32), made(2, dtype=torch.int32))
    given = PagedExpandedAttention(
        q=made(2, 40, 4, 24 + R),
        latent_pages=pages[..., :L],
        rope_pages=pages[..., L:],
        block_table=numbers[0],
        seq_lens=numbers[1],
        w_uk=made(4, 24, L),
        w_uv=made(4, 8, L),
        causal=True,
        scale=0.1,
        workspace_tokens=24,
    )
    return dataclasses.replace(given, **changes)


def steps(launches):
    return [
        (launch.kernel, launch.grid, launch.constants, [a for a in launch.arguments if isinstance(a, int)])
        for launch in launches
    ]


@pytest.mark.parametrize(
    ("run", "bundle_of", "kernels"),
    [
        (expanded_attention_triton, prompt, {"attend_chunk"}),
        (paged_expanded_attention_triton, paged_prompt, {"attend_chunk", "gather_chunk"}),
    ],
    ids=["dense", "pages"],
)
def test_a_second_prompt_makes_no_plan_and_launches_the_same(run, bundle_of, kernels, launches, monkeypatch):
    for module in (chunked, gathered):
        monkeypatch.setattr(module, "PLANS", Plans())
    run(bundle_of(), H100)
    first, launches[:] = steps(launches), []
    assert {kernel for kernel, *_ in first} == kernels
    assert len(first) > 2
    assert len(chunked.PLANS) == 1
    monkeypatch.setattr(chunked, "_new_plan", None)
    monkeypatch.setattr(chunked, "constants_of", None)
    monkeypatch.setattr(gathered, "constants_of", None)
    run(bundle_of(scale=0.2), H100)
    assert steps(launches) == first


OTHER_PROMPTS = {
    "fewer queries": {"q": made(1, 39, 4, 24 + R)},
    "fewer keys": {"latent": made(1, 95, L), "k_rope": made(1, 95, R)},
    "another limit": {"causal_offset": 50},
    "no limit": {"causal_offset": None},
    "a mask": {"mask": made(1, 1, 40, 96, dtype=torch.bool)},
    "another workspace": {"workspace_tokens": 48},
}


@pytest.mark.parametrize("change", OTHER_PROMPTS.values(), ids=OTHER_PROMPTS)
def test_what_a_prompt_depends_on_makes_another_plan(change, launches, monkeypatch):
    monkeypatch.setattr(chunked, "PLANS", Plans())
    expanded_attention_triton(prompt(), H100)
    launches.clear()
    expanded_attention_triton(prompt(**change), H100)
    assert len(chunked.PLANS) == 2
    kept = steps(launches)
    monkeypatch.setattr(chunked, "PLANS", Plans())
    launches.clear()
    expanded_attention_triton(prompt(**change), H100)
    assert steps(launches) == kept
