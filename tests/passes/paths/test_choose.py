"""The report says what runs: its words against the ops of the graph, for every path and layout of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx
from torch.utils._sympy.value_ranges import ValueRanges

from mla_compile.cost import Device
from mla_compile.passes.paths.choose import Chooser
from mla_compile.passes.paths.either import Either
from mla_compile.passes.pipeline import Pipeline
from tests.passes.caches import test_fp8_pages as fp8_pages
from tests.passes.caches.test_fp8 import a_buffer
from tests.passes.caches.test_fp8 import inputs as fp8_inputs
from tests.passes.caches.test_fp8 import step as named_step
from tests.passes.caches.test_pages import L, N, P, R, V, attend, gathered_elements, inputs
from tests.passes.graphs import capture, on_a_gpu, shapes_of

T = 12
COUNTING = Device("that only counts FLOPs", 1e9, 1e18)
"""On it, each of the two paths of a dense cache is the faster one at some sizes."""
UP_TO_LENGTHS = "reads the cache up to lengths, a page a sequence"
PAGES = "reads the pages"
GATHERED = "what the pages hold is gathered first"


def dense(q: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
    return attend(q, cache, weight)


def static(q: Tensor, cache: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, cache, weight, torch.arange(cache.shape[1]) < lengths[:, None, None, None])


def paged(q: Tensor, pool: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return attend(q, pool[table].flatten(1, 2), weight)


def capped(q: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """MLA under a soft cap: the scores are not a sum of products."""
    latent, k_rope = tokens.split([L, R], dim=-1)
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return (q @ k.mT).tanh().softmax(-1) @ v


def named(tokens: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(q: Tensor, scores: Tensor, weight: Tensor, *cache: Tensor) -> Tensor:
        some = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(5).indices, True)
        return attend(q, tokens(*cache), weight, some[:, None])

    return function


def gathered(pool: Tensor, table: Tensor) -> Tensor:
    return pool[table].flatten(1, 2)


@dataclass(frozen=True)
class Case:
    """A site, the path that is asked for, and the ops and words that have to come of it."""

    function: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    path: str
    ops: tuple[str, ...]
    words: str = ""
    gpu: bool = False
    """Whether to pretend that no kernel looks at masks, as on a GPU."""
    ranged: tuple[tuple[int, ...], ...] = ()
    """Dimensions of the tensors that are symbols without guards, as in an exported program."""


Q, POOL, TABLE, WEIGHT = inputs(queries=9)
CACHE, LENGTHS = torch.randn(2, T, L + R), torch.tensor([7, 2])
RANGED = ((2,), (1,))

CASES = {
    "dense absorbed": Case(dense, (Q, CACHE, WEIGHT), "absorbed", ("latent_attention",)),
    "dense chunked": Case(dense, (Q, CACHE, WEIGHT), "chunked", ("expanded_attention",)),
    "static absorbed": Case(static, (Q, CACHE, WEIGHT, LENGTHS), "absorbed", ("latent_attention",)),
    "static absorbed on a GPU": Case(
        static, (Q, CACHE, WEIGHT, LENGTHS), "absorbed", ("paged_latent_attention",), UP_TO_LENGTHS, gpu=True
    ),
    "static chunked": Case(
        static, (Q, CACHE, WEIGHT, LENGTHS), "chunked", ("paged_expanded_attention",), UP_TO_LENGTHS
    ),
    "paged absorbed": Case(paged, (Q, POOL, TABLE, WEIGHT), "absorbed", ("paged_latent_attention",), PAGES),
    "paged chunked": Case(paged, (Q, POOL, TABLE, WEIGHT), "chunked", ("paged_expanded_attention",), PAGES),
    "FP8 pages": Case(
        lambda q, weight, *cache: fp8_pages.attend(q, *next(iter(fp8_pages.READS.values()))(*cache), weight),
        fp8_pages.inputs(),
        "absorbed",
        ("paged_latent_attention",),
        PAGES,
    ),
    "named": Case(
        named(lambda tokens: tokens), (Q, torch.randn(2, 9, T), WEIGHT, CACHE), "sparse", ("sparse_latent_attention",)
    ),
    "named in pages": Case(
        named(gathered), (Q, torch.randn(2, 9, T), WEIGHT, POOL, TABLE), "sparse", ("sparse_latent_attention",), PAGES
    ),
    "named in FP8": Case(
        named_step(a_buffer), fp8_inputs(), "sparse", ("sparse_latent_attention",), "reads keys in FP8"
    ),
    "opaque": Case(capped, (Q, CACHE, WEIGHT), "absorbed", ()),
    "opaque in pages": Case(
        lambda q, pool, table, weight: capped(q, gathered(pool, table), weight),
        (Q, POOL, TABLE, WEIGHT),
        "absorbed",
        (),
        GATHERED,
    ),
    "exported": Case(dense, (Q, CACHE, WEIGHT), "auto", ("latent_attention", "expanded_attention"), ranged=RANGED),
    "exported, static": Case(
        static,
        (Q, CACHE, WEIGHT, LENGTHS),
        "auto",
        ("latent_attention", "paged_expanded_attention"),
        f"chunked {UP_TO_LENGTHS}",
        ranged=RANGED,
    ),
    "exported, static on a GPU": Case(
        static,
        (Q, CACHE, WEIGHT, LENGTHS),
        "auto",
        ("paged_latent_attention", "paged_expanded_attention"),
        UP_TO_LENGTHS,
        gpu=True,
        ranged=RANGED,
    ),
    "exported, paged": Case(
        paged,
        (Q, POOL, TABLE, WEIGHT),
        "auto",
        ("paged_latent_attention", "paged_expanded_attention"),
        PAGES,
        ranged=((2,), (), (1,)),
    ),
}


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list:
    """The choice for each site that the pipeline handles, in order."""
    made = []
    choose = Chooser.__call__
    monkeypatch.setattr(Chooser, "__call__", lambda self, *args: made.append(choose(self, *args)) or made[-1])
    return made


def attention_ops(module: fx.GraphModule) -> list[str]:
    """The names of the mla ops that attend, in branches too."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    names = [str(node.target).split(".") for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [name[1] for name in names if name[0] == "mla" and "attention" in name[1]]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_report_says_what_runs(case: Case, choices: list) -> None:
    module = capture(case.function, *case.tensors, symbolic=case.ranged)
    ranges = {symbol: ValueRanges(2, 500) for symbol in shapes_of(module).var_to_range} if case.ranged else None
    with on_a_gpu() if case.gpu else nullcontext():
        (result,) = Pipeline(COUNTING, case.path, 4, ranges)(module)
    outcome = result.outcome
    (choice,) = choices
    plans = (choice.plan.first, choice.plan.second) if isinstance(choice.plan, Either) else (choice.plan,)
    assert sorted(attention_ops(module)) == sorted(case.ops)
    assert sorted(op for plan in plans if (op := plan.path.op(plan.keys))) == sorted(case.ops)
    assert (outcome.path, outcome.reason) == (choice.word, choice.reason)
    assert outcome.path == " or ".join(plan.path.word for plan in plans)
    assert outcome.reason.partition("; ")[2] == case.words
    if case.words == PAGES:
        assert gathered_elements(module) == 0
