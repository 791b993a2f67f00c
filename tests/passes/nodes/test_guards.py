"""Graphs that take no guards: a comparison that would need one is refused, one that holds for all sizes is not."""

import pytest
import torch
from torch.utils._sympy.value_ranges import ValueRanges

from mla_compile.passes.code.reading import write_as
from mla_compile.passes.nodes.guards import GuardNeeded, equal_by_guard, no_guards
from mla_compile.passes.paths import one_op
from mla_compile.passes.pipeline import Pipeline
from tests.passes.graphs import DEVICE, capture, shapes_of
from tests.passes.spellings import HIDDEN


def outcome_of(module, ranges):
    (result,) = Pipeline(DEVICE, "absorbed", ranges=ranges)(module)
    return result.outcome


@pytest.fixture
def size():
    module = capture(lambda x: x * 2, torch.randn(7, HIDDEN), symbolic=[[0]])
    return next(iter(module.graph.nodes)).meta["val"].shape[0]


def test_a_comparison_that_sizes_decide_is_refused(size):
    environment = size.node.shape_env
    with no_guards(environment), pytest.raises(GuardNeeded, match=r"< 10"):
        bool(size < 10)
    assert not environment.guards


def test_one_that_all_sizes_fulfil_is_not(size):
    with no_guards(size.node.shape_env):
        assert size > 1


def test_guards_are_taken_again_afterwards(size):
    with no_guards(size.node.shape_env):
        pass
    assert size < 10
    assert size.node.shape_env.guards


def test_an_attention_whose_code_needs_one_stays_unchanged(monkeypatch):
    def attention(q, latent, w_uk, w_uv):
        return torch.softmax(q @ (latent @ w_uk).mT, dim=-1) @ (latent @ w_uv)

    tensors = torch.randn(4, 3, 8), torch.randn(9, 16), torch.randn(4, 16, 8), torch.randn(4, 16, 8)
    module = capture(attention, *tensors, symbolic=[[], [0]])
    environment = shapes_of(module)
    before, ranges = str(module.graph), {s: ValueRanges(2, 100) for s in environment.var_to_range}

    def only_short(tensor, layout, dims, realize):
        assert all(realize(symbol) < 50 for symbol in ranges)
        return write_as(tensor, layout, dims, realize)

    monkeypatch.setattr(one_op, "write_as", only_short)
    site = outcome_of(module, ranges)
    assert site.path == "unchanged"
    assert "expected code that is right for all declared sizes, found code that needs" in site.reason
    assert str(module.graph) == before
    site = outcome_of(module, None)
    assert site.path == "absorbed"


def test_a_size_becomes_what_it_is_now_by_one_guard(size):
    environment = size.node.shape_env
    assert not equal_by_guard(size, 8)
    assert not environment.guards
    assert equal_by_guard(size, 7)
    assert equal_by_guard(size, 7)
    assert len(environment.guards) == 1


def test_a_size_of_a_graph_that_takes_no_guards_is_no_number(size):
    with no_guards(size.node.shape_env):
        assert equal_by_guard(size, size)
        assert not equal_by_guard(size, 7)
