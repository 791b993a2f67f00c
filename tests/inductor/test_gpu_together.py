"""Which small kernels become one launch: of one kind, none depending on another, in an order that can be run."""

import random
from graphlib import TopologicalSorter

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.scheduler import ForeachKernelSchedulerNode

from mla_compile.inductor import codegen
from mla_compile.inductor.gpu_together import joined, together
from tests.models import HIDDEN, Combined, L, R


def test_a_rotation_of_queries_joins_a_write_of_keys():
    """As in V3's layer, where queries are rotated after two products and a norm, and keys after one product."""
    names = ["q_a", "q norm", "q_b", "rotate q", "kv_a", "latent norm", "rotate k", "attend"]
    waits = [[], [0], [1], [2], [], [4], [4, 5], [3, 6]]
    kinds = [None, "sum", None, "each", None, "sum", "each", None]
    assert [[names[i] for i in group] for group in joined(waits, kinds)] == [
        ["q_a"],
        ["q norm", "latent norm"],
        ["q_b"],
        ["rotate q", "rotate k"],
        ["kv_a"],
        ["attend"],
    ]


def test_what_depends_on_a_group_does_not_join_it():
    """The last node does not join the first, since it depends on it through the third."""
    assert joined([[], [], [0], [1, 2]], ["a", "b", "b", "a"]) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_can_be_run_one_after_the_other(seed):
    made = random.Random(seed)
    count = 120
    waits = [sorted(made.sample(range(i), min(i, made.choice([0, 1, 2])))) for i in range(count)]
    kinds = [made.choice([None, "a", "b"]) for _ in range(count)]
    groups = joined(waits, kinds)
    of = {node: i for i, group in enumerate(groups) for node in group}
    assert sorted(of) == list(range(count))
    assert max(map(len, groups)) <= 8
    assert any(len(group) > 1 for group in groups)
    for group in groups:
        assert len({kinds[node] for node in group}) == 1
        assert len(group) == 1 or kinds[group[0]] is not None
        assert group[-1] - group[0] <= 32
    graph = {i: {of[other] for node in group for other in waits[node]} for i, group in enumerate(groups)}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert all(i not in others for i, others in graph.items())


class _Asked(BaseException):
    """Leaves Inductor once it is asked; not an `Exception`, which it would wrap."""


@pytest.mark.parametrize(
    ("launched", "options", "wanted"),
    [(True, {}, True), (False, {}, False), (True, {"combo_kernels": False}, False)],
    ids=["with launches of ours", "without", "the user says no"],
)
def test_inductor_is_asked_where_there_are_launches_and_the_user_says_nothing(monkeypatch, launched, options, wanted):
    asked = []

    def inner(*_, **__):
        asked.append(config.combo_kernels)
        raise _Asked

    monkeypatch.setattr(codegen, "put_launches", lambda graph, kernels, **_: launched)
    monkeypatch.setattr(codegen, "compile_fx_inner", inner)
    x, cache = torch.randn(1, 1, HIDDEN), (torch.randn(1, 40, L), torch.randn(1, 40, R))
    torch.compiler.reset()
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False), pytest.raises(_Asked):
        torch.compile(Combined(), backend="mla", options=options)(x, cache)
    assert asked == [wanted]
    assert not config.combo_kernels


@pytest.mark.skipif(not hasattr(config, "combo_kernel_max_distance"), reason="this torch asks for groups")
def test_a_bound_of_memory_that_the_user_sets_is_kept():
    """While a bound is set, torch does not ask for our groups. Its default bound is lifted, the user's is not."""
    default, grouping = config.combo_kernel_peak_memory_pct_threshold, ForeachKernelSchedulerNode.__dict__
    groups = "group_algorithm_for_combo_kernels"
    before = grouping[groups]
    with together():
        assert (config.combo_kernels, config.combo_kernel_peak_memory_pct_threshold) == (True, None)
        assert grouping[groups] is not before
    with config.patch(combo_kernel_peak_memory_increase_gb=0.5), together():
        assert (config.combo_kernels, config.combo_kernel_peak_memory_increase_gb) == (True, 0.5)
        assert grouping[groups] is before
    assert config.combo_kernel_peak_memory_pct_threshold == default
