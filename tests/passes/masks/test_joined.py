"""Keys in two parts with a mask each, as in DeepSeek-V4: if a top-k names keys of one, both name theirs to the op."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, arange, fx

from mla_compile.cost import Device
from mla_compile.passes.pipeline import Pipeline
from tests.errors import assert_as_close_as_eager
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run

B, N, L, HIDDEN = 2, 3, 8, 13
TOPK, WINDOW = 2, 3
INFINITY = float("-inf")
LEAST = torch.finfo(torch.float32).min

Mask = Callable[..., Tensor]


def tensors(queries: int, near: int, far: int) -> tuple[Tensor, ...]:
    """`x` [B, Sq, HIDDEN], latents `near` [B, T1, L] and `far` [B, T2, L], `w_q` [HIDDEN, N L], scores [B, Sq, T2]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, queries, HIDDEN), (B, near, L), (B, far, L), (HIDDEN, N * L), (B, queries, far)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def window(queries: int, near: int, scores: Tensor) -> Tensor:
    """0 at the latest `WINDOW` keys up to a query's own, [1, 1, Sq, T1], and a low number elsewhere."""
    query, key = arange(queries)[:, None] + (near - queries), arange(near)
    seen = (key <= query) & (key > query - WINDOW)
    return torch.where(seen, 0.0, torch.full((), LEAST, dtype=torch.float64))[None, None]


def named(scores: Tensor, *, ready: bool = True, extra: int = 1) -> Tensor:
    """0 at the keys with the greatest scores, -inf elsewhere, as transformers writes it.

    Keys that are not `ready` for a query go to an extra column, which is cut off.
    """
    far = scores.shape[2]
    index = scores.topk(TOPK, dim=-1).indices
    if ready:
        threshold = ((arange(scores.shape[1]) + 1) // 2)[None, :, None]
        index = torch.where(index >= threshold, torch.full_like(index, -1), index)
        index = torch.where(index >= 0, index, torch.full_like(index, far))
    rows = scores.new_full((B, 1, scores.shape[1], far + extra), INFINITY)
    return rows.scatter(-1, index[:, None], 0.0)[..., :far]


def attention(mask: Mask) -> Callable[..., Tensor]:
    """Attention whose keys are its values, the same for all heads."""

    def attend(x: Tensor, near: Tensor, far: Tensor, w_q: Tensor, scores: Tensor) -> Tensor:
        q = (x @ w_q).view(x.shape[0], x.shape[1], N, L).transpose(1, 2)
        keys = torch.cat([near, far], 1)[:, None].expand(-1, N, -1, -1)
        return (q @ keys.mT * 0.3 + mask(x.shape[1], near.shape[1], scores)).softmax(-1) @ keys

    return attend


def of_two(first: Mask = window, second: Callable[..., Tensor] = named) -> Mask:
    def mask(queries: int, near: int, scores: Tensor) -> Tensor:
        seen = first(queries, near, scores).expand(B, 1, queries, near)
        return torch.cat([seen, second(scores).to(seen.dtype)], -1)

    return mask


def indices(module: fx.GraphModule) -> Tensor:
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
    found: Tensor = node.args[4].meta["val"]
    return found


SIZES = {"prefill": (5, 5, 7, WINDOW), "a step": (1, 3, 6, 3), "a step of a long window": (1, 9, 6, WINDOW)}


@pytest.mark.parametrize("symbolic", [(), [(1,), (1,), (1,), (), (1, 2)]], ids=["static", "symbolic"])
@pytest.mark.parametrize(("queries", "near", "far", "of_window"), SIZES.values(), ids=SIZES)
def test_a_window_and_named_keys(queries: int, near: int, far: int, of_window: int, symbolic: list) -> None:
    if queries == 1:
        symbolic = [tuple(d for d in own if i in (1, 2) or d == 2) for i, own in enumerate(symbolic)]
    given = tensors(queries, near, far)
    module = capture(attention(of_two()), *given, symbolic=symbolic)
    before = run(copy.deepcopy(module), *given)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    assert "top-k" in outcome.mask
    check_right(before, run(module, *given))
    if not symbolic:
        assert indices(module).shape == (B, queries, of_window + TOPK)


def no_window(queries: int, near: int, scores: Tensor) -> Tensor:
    return torch.zeros(1, 1, queries, near, dtype=torch.float64)


def causal(queries: int, near: int, scores: Tensor) -> Tensor:
    hidden = arange(near) > arange(queries)[:, None] + (near - queries)
    return torch.zeros(()).double().masked_fill(hidden, INFINITY)[None, None]


def in_order(queries: int, near: int, scores: Tensor) -> Tensor:
    """A top-k in the first part, too."""
    return named(scores[..., :near], ready=False)


def beyond(queries: int, near: int, scores: Tensor) -> Tensor:
    """No key: those that are meant lie behind the last one."""
    hidden = arange(near) <= arange(queries)[:, None] + near
    return torch.zeros(()).double().masked_fill(hidden, INFINITY)[None, None]


def between_no_two(queries: int, near: int, scores: Tensor) -> Tensor:
    """No key: the first limit is behind the last."""
    key, query = arange(near), arange(queries)[:, None]
    return torch.zeros(()).double().masked_fill((key <= query + 3) | (key > query + 1), INFINITY)[None, None]


def repeated(scores: Tensor) -> Tensor:
    index = scores.topk(TOPK, dim=-1).indices
    index = torch.cat([index, index.flip(-1)], -1)
    return scores.new_full((B, 1, *scores.shape[1:]), INFINITY).scatter(-1, index[:, None], 0.0)


WAYS: dict[str, tuple[Mask, int]] = {
    "all of the first part": (of_two(no_window), 5 + TOPK),
    "causal in the first part": (of_two(causal), 5 + TOPK),
    "indices that are all keys": (of_two(window, lambda s: named(s, ready=False, extra=0)), WINDOW + TOPK),
    "indices that repeat": (of_two(window, repeated), WINDOW + 2 * TOPK),
    "both parts are named": (of_two(in_order), 2 * TOPK),
    "no key of the first part": (of_two(beyond, lambda s: named(s, ready=False)), 5 + TOPK),
    "no key between the limits": (of_two(between_no_two, lambda s: named(s, ready=False)), 5 + TOPK),
}


@pytest.mark.parametrize(("mask", "count"), WAYS.values(), ids=WAYS)
def test_each_part_is_named_in_its_own_way(mask: Mask, count: int) -> None:
    given = tensors(5, 5, 7)
    module = capture(attention(mask), *given)
    before = run(copy.deepcopy(module), *given)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    assert indices(module).shape == (B, 5, count)
    check_right(before, run(module, *given))


def random(queries: int, near: int, scores: Tensor) -> Tensor:
    return scores[:, None, :, :near]


def two_numbers(scores: Tensor) -> Tensor:
    """Scores of keys that are not named are lowered by 3, which does not hide them."""
    index = scores.topk(TOPK, dim=-1).indices
    return scores.new_full((B, 1, *scores.shape[1:]), -3.0).scatter(-1, index[:, None], 0.0)


def nobody_sees_the_first(queries: int, near: int, scores: Tensor) -> Tensor:
    return torch.full((1, 1, queries, near), LEAST, dtype=torch.float64)


def some_queries(queries: int, near: int, scores: Tensor) -> Tensor:
    """A top-k of the queries that attend to the first part at all."""
    index = scores[..., :1].topk(2, 1).indices
    return scores.new_full((B, queries, 1), INFINITY).scatter(1, index, 0.0)[:, None]


TENSORS: dict[str, Mask] = {
    "a first part that some queries see": of_two(some_queries, lambda s: named(s, ready=False)),
    "a bias of the first part": of_two(random),
    "a number that hides nothing": of_two(window, two_numbers),
    "no keys that are named": of_two(window, lambda s: torch.zeros(B, 1, *s.shape[1:], dtype=torch.float64)),
    "a first part that is hidden, by a finite number": of_two(nobody_sees_the_first),
}


@pytest.mark.parametrize("mask", TENSORS.values(), ids=TENSORS)
def test_other_joins_stay_one_tensor(mask: Mask) -> None:
    given = tensors(5, 5, 7)
    module = capture(attention(mask), *given)
    before = run(copy.deepcopy(module), *given)
    (outcome,) = rewrite(module, "auto")
    assert (outcome.path, outcome.mask) == ("absorbed", "tensor")
    check_right(before, run(module, *given))


def test_the_cost_model_takes_few_of_many_keys() -> None:
    """Of 8,192 compressed keys, 2 are named, and 3 are in the window: 5 of 8,195 keys are read."""
    few, many = tensors(1, 3, 2), tensors(1, 3, 8192)
    device = Device("of the tests", 1e12, 1e11)
    found = {}
    for name, given in {"few": few, "many": many}.items():
        module = capture(attention(of_two()), *given)
        before = run(copy.deepcopy(module), *given)
        (result,) = Pipeline(device)(module)
        check_right(before, run(module, *given))
        found[name] = result.outcome.path
    assert found == {"few": "absorbed", "many": "sparse"}


def test_without_named_keys_the_mask_is_the_graphs_own() -> None:
    """The absorbed path reads all keys, under the mask that the graph has computed."""
    given = tensors(5, 5, 7)
    module = capture(attention(of_two()), *given)
    before = run(copy.deepcopy(module), *given)
    (outcome,) = rewrite(module, "absorbed")
    assert (outcome.path, outcome.mask) == ("absorbed", "causal + window + top-k")
    check_right(before, run(module, *given))


def test_sinks_take_all_the_weight_of_a_query_that_sees_no_key() -> None:
    """Padding hides the first keys by a finite number, and nothing of the second part is ready for the first query."""

    def padded(queries: int, near: int, scores: Tensor) -> Tensor:
        hidden = arange(near) < torch.tensor([2, 0])[:, None, None, None]
        return window(queries, near, scores).to(scores).masked_fill(hidden, LEAST)

    def attend(x: Tensor, near: Tensor, far: Tensor, w_q: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
        q = (x @ w_q).view(*x.shape[:2], N, L).transpose(1, 2)
        keys = torch.cat([near, far], 1)[:, None].expand(-1, N, -1, -1)
        logits = q @ keys.mT * 0.3 + of_two(padded)(x.shape[1], near.shape[1], scores)
        logits = torch.cat([logits, sinks.view(1, N, 1, 1).expand(B, N, x.shape[1], 1)], -1)
        return logits.softmax(-1)[..., :-1] @ keys

    given = [*(t.float() for t in tensors(5, 5, 7)), torch.tensor([0.5, -1.0, 2.0])]
    module = capture(attend, *given)
    eager = run(copy.deepcopy(module), *given)
    (outcome,) = rewrite(module, "sparse")
    assert (outcome.path, outcome.mask) == ("sparse", "causal + window + top-k")
    compiled = run(module, *given)
    assert (compiled[0, :, 0] == 0).all()
    assert_as_close_as_eager(compiled, eager, attend(*(t.double() for t in given)))
