"""Keys that a mask names one by one, as by a top-k, are all that sparse attention reads; in doubt it stays a mask."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, arange, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.mask_cases import (
    ADDED,
    KNOWN,
    LEFT,
    MINIMUM,
    SCORES,
    Case,
    Mask,
    added,
    attention,
    by_hand,
    causal,
    generator,
    masks_left,
)
from tests.passes.spellings import SQ, B, N, T

SPARSE = {name: (attention, KNOWN[name]) for name in ("top-k", "top-k, inverted, causal", "indices with repetitions")}
SPARSE |= {
    name: (by_hand, ADDED[name])
    for name in ("top-k scattered into infinity", "top-k as DeepSeek writes it", "top-k filled into a causal mask")
}
NOWHERE = torch.rand(B, SQ, T, generator=generator) - (arange(T) < 9).double()
"""Scores that are greatest at keys that a top-left causal mask hides."""


def sparse(function: mla.Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()) -> fx.GraphModule:
    module = capture(function, *tensors, symbolic=symbolic)
    before = copy.deepcopy(module)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    check_right(run(before, *tensors), run(module, *tensors))
    return module


@pytest.mark.parametrize(("spelling", "case"), SPARSE.values(), ids=SPARSE)
def test_named_keys_are_all_that_is_read(spelling: Callable[[Mask], mla.Function], case: Case) -> None:
    module = sparse(spelling(case.mask), (*mla.tensors(), *case.more))
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
    assert node.args[4].meta["val"].shape == (B, SQ, 4)
    assert node.args[5] is None
    assert all(n.target is torch.ops.aten.topk.default or n in case_inputs(n) for n in masks_left(module))


def case_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.graph.nodes if n.op == "placeholder"]


ROWS = {
    "bool": lambda seen: seen,
    "infinity": lambda seen: added(seen, -math.inf),
    "a finite number": lambda seen: added(seen, MINIMUM),
}


@pytest.mark.parametrize("spelling", [attention, by_hand])
@pytest.mark.parametrize("kind", ROWS)
def test_queries_whose_named_keys_are_all_hidden(kind: str, spelling: Callable[[Mask], mla.Function]) -> None:
    """0 from SDPA, NaN from a softmax, the mean of all values if a finite number hides: as before the passes."""
    if kind == "bool" and spelling is by_hand:
        pytest.skip("a bool mask is not added")

    def mask(s: int, t: int, x: Tensor, seen: Tensor) -> Tensor:
        named = torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(2).indices, True)[:, None]
        return ROWS[kind](named & (arange(t) <= arange(s)[:, None]) & seen[:, None, None])

    sparse(spelling(mask), (*mla.tensors(), NOWHERE, LEFT))


@pytest.mark.parametrize(
    "limit", ["lengths", "offset of a tensor", "positions of a tensor", "sliding window", "left padding"]
)
def test_named_keys_and_another_limit(limit: str) -> None:
    case = KNOWN[limit]

    def mask(s: int, t: int, x: Tensor, *more: Tensor) -> Tensor:
        named = torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(5).indices, True)[:, None]
        return named & case.mask(s, t, *more)

    for symbolic in ((), [(0,), (0,), (0,), (), (), (0,)]):
        module = sparse(attention(mask), (*mla.tensors(), SCORES, *case.more), symbolic)
        (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
        assert node.args[5] is None


def test_named_keys_with_symbolic_sizes() -> None:
    case = KNOWN["top-k, inverted, causal"]
    sparse(attention(case.mask), (*mla.tensors(), SCORES), [*mla.UNKNOWN, (), (), (0, 1, 2)])


def test_one_query_names_its_keys() -> None:
    case = KNOWN["top-k, inverted, causal"]
    sparse(attention(case.mask), (*mla.tensors(queries=1), SCORES[:, :1]))


@pytest.mark.parametrize(
    "mask",
    [
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None]
        & torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(6).indices, True)[:, None],
        lambda s, t, x: torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, False)[:, None],
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None]
        | causal(s, t),
        lambda s, t, x: torch.zeros(x.shape).double().scatter(-1, x.topk(4).indices, -math.inf)[:, None],
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, 1.0)[:, None],
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, x.double())[:, None],
    ],
    ids=["two sets", "all but these", "these or causal", "hidden", "another number", "numbers of their own"],
)  # fmt: skip
def test_what_names_keys_otherwise_is_not_sparse(mask: Mask) -> None:
    tensors = (*mla.tensors(), SCORES)
    module = capture(attention(mask), *tensors)
    before = copy.deepcopy(module)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path in ("absorbed", "chunked")
    check_right(run(before, *tensors), run(module, *tensors))


@pytest.mark.parametrize(("queries", "some_see_nothing"), [(1, False), (SQ, True)])
@pytest.mark.parametrize("symbolic", [(), [*mla.UNKNOWN, (), (), (0, 1, 2)]], ids=["known sizes", "symbolic sizes"])
def test_where_each_query_sees_a_key_that_it_names_the_mean_of_all_is_not_taken(
    queries: int, some_see_nothing: bool, symbolic: Sequence[Sequence[int]]
) -> None:
    """It would read the whole cache. The last query, which sees all keys, sees those that it names."""

    def mask(s: int, t: int, x: Tensor) -> Tensor:
        named = torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None]
        return added(named & causal(s, t), MINIMUM)

    module = sparse(by_hand(mask), (*mla.tensors(queries=queries), SCORES[:, :queries]), symbolic)
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
    assert node.args[8] == some_see_nothing


def test_weights_that_are_no_numbers_where_a_query_sees_none_of_its_keys() -> None:
    """It attends to all keys alike, so that its weights are numbers: the path `absorbed` knows, `sparse` does not."""

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, best: Tensor) -> Tensor:
        q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
        named = torch.zeros(best.shape, dtype=torch.bool).scatter(-1, best.topk(3).indices, True)[:, None]
        hidden = ~(named & (arange(T) <= arange(SQ)[:, None]))
        return (q @ k.mT * mla.SCALE).masked_fill(hidden, -1e9).softmax(-1).nan_to_num() @ v

    tensors = (*mla.tensors(), NOWHERE)
    module = capture(function, *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "absorbed"
    check_right(before, run(module, *tensors), score=1e9)


def test_lengths_are_multiplied_in_the_graphs_dtype() -> None:
    """A length in int32 that stands for no limit: twice as much is beyond int32."""
    tensors = *mla.tensors(), torch.rand(B, SQ, T, generator=generator), torch.tensor([2**31 - 1, 2], dtype=torch.int32)
    sparse(
        attention(
            lambda s, t, x, n: (
                torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)
                & (arange(t) < n.long()[:, None, None] * 2)
            )[:, None]
        ),
        tensors,
    )


ATTEND_AT_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "queries": lambda x: torch.zeros(B, SQ, 1, dtype=torch.bool).scatter(1, x[..., :1].topk(2, 1).indices, True)[
        :, None
    ],
    "heads": lambda x: torch.zeros(B, N, 1, 1, dtype=torch.bool).scatter(
        1, x[:, 0, :N, None, None].topk(2, 1).indices, True
    ),
    "heads of each query": lambda x: torch.zeros(B, N, SQ, 1, dtype=torch.bool).scatter(
        1, x[..., :N].mT[..., None].topk(2, 1).indices, True
    ),
    "sequences": lambda x: torch.zeros(B, 1, 1, 1, dtype=torch.bool).scatter(
        0, x[:, :1, :1, None].topk(1, 0).indices, True
    ),
    "queries of each key": lambda x: torch.zeros(B, SQ, T, dtype=torch.bool).scatter(1, x.topk(2, 1).indices, True)[
        :, None
    ],
}


@pytest.mark.parametrize("seen", ATTEND_AT_ALL.values(), ids=ATTEND_AT_ALL)
@pytest.mark.parametrize("path", ["auto", "absorbed"])
def test_indices_of_something_else_name_no_keys(path: str, seen: Callable[[Tensor], Tensor]) -> None:
    """Which queries, heads or sequences attend at all, as a mixture of depths chooses them."""
    tensors = *mla.tensors(), torch.rand(B, SQ, T, generator=generator)
    module = capture(attention(lambda s, t, x: seen(x)), *tensors)
    before = copy.deepcopy(module)
    (outcome,) = rewrite(module, path)
    assert (outcome.path, outcome.mask) == ("absorbed", "tensor")
    check_right(run(before, *tensors), run(module, *tensors))
