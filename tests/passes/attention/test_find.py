"""Attention is found in a graph, with its axes, scales and masks, however it is written; or a sentence says why not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_compile.passes.algebra.sizes import product
from mla_compile.passes.attention.attention import Attention
from mla_compile.passes.attention.find import find
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.trace.trace import Trace
from tests.passes.graphs import capture
from tests.passes.spellings import Function, sealed

B, N, SQ, T, E, V = 2, 3, 4, 5, 6, 7


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(B, N, SQ, E), torch.zeros(B, N, T, E), torch.zeros(B, N, T, V)


def found(function: Function, *inputs: Tensor) -> list[Attention | Refusal]:
    graph = capture(function, *(inputs or tensors())).graph
    return list(find(graph, Trace(graph)))


def attention(function: Function, *inputs: Tensor) -> Attention:
    (only,) = found(function, *inputs)
    assert isinstance(only, Attention)
    return only


def refusal(function: Function, *inputs: Tensor) -> str:
    (only,) = found(function, *inputs)
    assert isinstance(only, Refusal)
    return str(only)


def sizes(axes: object) -> list[int]:
    return sorted(axis.size for axis in axes)


BY_HAND: dict[str, Function] = {
    "matmul": lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bnst,bntv->bnsv", torch.einsum("bnse,bnte->bnst", q, k).softmax(-1), v),
    "merged": lambda q, k, v: torch.bmm(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)),
    "keys first": lambda q, k, v: (k @ q.transpose(-1, -2)).softmax(-2).mT @ v,
    "values first": lambda q, k, v: v.mT @ (q @ k.transpose(-1, -2)).softmax(-1).mT,
    "cast": lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v,
    "exponential over its sum": lambda q, k, v: torch.exp(q @ k.mT) / torch.exp(q @ k.mT).sum(-1, keepdim=True) @ v,
    "times the reciprocal": lambda q, k, v: torch.exp(q @ k.mT) * (1 / torch.exp(q @ k.mT).sum(-1, keepdim=True)) @ v,
}


@pytest.mark.parametrize("function", [*BY_HAND.values(), lambda q, k, v: sealed(q, k, v)], ids=[*BY_HAND, "sdpa"])
def test_rows_keys_and_columns(function: Function) -> None:
    a = attention(function)
    assert sizes(a.rows) == [B, N, SQ]
    assert sizes(a.keys) == [T]
    assert sizes(a.columns) == [V]
    (score,) = a.scores
    assert sizes(score.summed) == [E]
    assert sizes(score.query.axes) == [B, N, SQ, E]
    assert sizes(score.key.axes) == [B, N, T, E]
    assert sizes(a.value.axes) == [B, N, T, V]
    assert a.masks == ()


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (lambda q, k, v: (q @ k.mT * 0.25).softmax(-1) @ v, 0.25),
        (lambda q, k, v: (q @ k.mT / 8).softmax(-1) @ v, 0.125),
        (lambda q, k, v: ((q @ k.mT / 2).float() / 4).softmax(-1) @ v, 0.125),
        (lambda q, k, v: sealed(q, k, v), 1 / math.sqrt(E)),
        (lambda q, k, v: sealed(q, k, v, scale=0.5), 0.5),
    ],
)
def test_the_scale_of_the_scores(function: Function, scale: float) -> None:
    (score,) = attention(function).scores
    assert score.scale == pytest.approx(scale, rel=1e-15)


def test_scores_that_are_a_sum_have_a_scale_each() -> None:
    a = attention(lambda q, k, v: ((q @ k.mT + q[..., :2] @ k[..., :2].mT * 3) / 2).softmax(-1) @ v)
    assert [score.scale for score in a.scores] == [0.5, 1.5]
    assert [sizes(score.summed) for score in a.scores] == [[E], [2]]


def test_masks_keep_their_order_their_factor_and_what_they_do() -> None:
    seen, bias = torch.ones(SQ, T, dtype=torch.bool), torch.zeros(B, 1, 1, T)
    a = attention(
        lambda s, b, q, k, v: (((q @ k.mT + b) * 0.5).masked_fill(~s, -math.inf) - b).softmax(-1) @ v,
        seen,
        bias,
        *tensors(),
    )
    assert [(m.attends, m.inverted, m.factor) for m in a.masks] == [
        (False, False, 0.5),
        (True, True, 1.0),
        (False, False, -1.0),
    ]
    assert [sizes(m.term.axes) for m in a.masks] == [[B, T], [SQ, T], [B, T]]


def test_a_bool_mask_of_sdpa_attends_and_any_other_is_added() -> None:
    for dtype, attends in ((torch.bool, True), (torch.float32, False)):
        a = attention(lambda m, q, k, v: sealed(q, k, v, m), torch.ones(SQ, T, dtype=dtype), *tensors())
        assert [m.attends for m in a.masks] == [attends]


def test_a_bool_tensor_added_by_hand_does_not_attend() -> None:
    mask = torch.ones(SQ, T, dtype=torch.bool)
    a = attention(lambda m, q, k, v: (q @ k.mT + m).softmax(-1) @ v, mask, *tensors())
    assert [m.attends for m in a.masks] == [False]


def test_causal_sdpa_says_which_axes_are_queries() -> None:
    a = attention(lambda q, k, v: sealed(q, k, v, causal=True))
    assert a.causal
    assert a.queries is not None
    assert sizes(a.queries) == [SQ]


def test_heads_that_share_keys_by_grouped_sdpa_are_two_axes() -> None:
    q = torch.zeros(B, 2 * N, SQ, E)
    a = attention(lambda q, k, v: sealed(q, k, v, enable_gqa=True), q, *tensors()[1:])
    assert product(axis.size for axis in a.dims[1]) == 2 * N
    assert [axis.size for axis in a.dims[1]] == [N, 2]
    assert sizes(a.value.axes) == [B, N, T, V]


@pytest.mark.parametrize(("fill", "opaque"), [(-100.0, True), (-1e4, False), (-1e9, False)])
def test_scores_of_which_a_mask_leaves_something_stay_as_they_are_between_the_products(
    fill: float, opaque: bool
) -> None:
    """A fill of -100 leaves hidden keys some weight: it is no mask, but a function of the scores (`opaque`)."""
    hidden = torch.ones(SQ, T, dtype=torch.bool)
    a = attention(lambda m, q, k, v: (q @ k.mT).masked_fill(m, fill).softmax(-1) @ v, hidden, *tensors())
    assert (a.opaque is not None) == opaque
    assert len(a.scores) == 1


def test_weights_that_serve_twice_exist() -> None:
    first, second = found(lambda q, k, v: (lambda p: p @ v + (p @ v.tanh()))((q @ k.mT).softmax(-1)))
    for a, other in ((first, second), (second, first)):
        assert isinstance(a, Attention)
        assert a.opaque is not None
        assert a.opaque.reader is not None
        assert other.node in (a.opaque.reader, *a.opaque.reader.users)


REFUSED: dict[str, tuple[Function, str]] = {
    "dropout": (lambda q, k, v: sealed(q, k, v, dropout=0.5), "attention without dropout, found dropout_p=0.5"),
    "a part of the weights": (
        lambda q, k, v: (q @ k.mT).softmax(-1)[..., 1:] @ v[..., 1:, :],
        "found that only a part of them is",
    ),
    "one row of the weights, under a function of the scores": (
        lambda q, k, v: (q @ k.mT).tanh().softmax(-1)[:, :, :1] @ v,
        "found that only a part of them is",
    ),
    "fewer heads of values than of keys": (
        lambda q, k, v: sealed(torch.cat([q, q], 1), k, v[:, :1], enable_gqa=True),
        "as many heads of keys as of values, found 3 and 1",
    ),
    "softmax over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "over the keys of the softmax"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_with_a_reason(function: Function, reason: str) -> None:
    given = [str(r) for r in found(function)]
    assert given
    assert all(text.startswith("expected ") and reason in text and ", at `" in text for text in given)


def test_weights_and_values_that_do_not_factor_alike_are_refused() -> None:
    q, k, v = torch.zeros(2, 6, SQ, E), torch.zeros(2, 6, T, E), torch.zeros(3, 4, T, V)
    text = refusal(lambda q, k, v: (q @ k.mT).softmax(-1).flatten(0, 1) @ v.flatten(0, 1), q, k, v)
    assert "attention weights and values to keep its axes" in text


GIVEN: dict[str, tuple[Function, str]] = {
    "as they are": (lambda s, k, v, mask: s, "`s_1` (placeholder)"),
    "with a mask": (lambda s, k, v, mask: mask + s.clone() * 0.5, "`s_1` (placeholder)"),
    "with a bool mask": (
        lambda s, k, v, mask: s.masked_fill(mask.expand(s.shape) > 0, -torch.inf),
        "`s_1` (placeholder)",
    ),
    "in another order": (lambda s, k, v, mask: s.transpose(0, 1).tanh().transpose(0, 1), "`s_1` (placeholder)"),
    "as two tensors": (
        lambda s, k, v, mask: s + v[..., :1].mT * s.exp() + k,
        "`k_1` (placeholder) and `s_1` (placeholder)",
    ),
    "and computed too": (lambda s, k, v, mask: s + s.cumsum(-1), "`add` (add.Tensor)"),
    "as sums of what queries and keys have": (lambda s, k, v, mask: v[..., :1].mT + s[..., :1], "`add` (add.Tensor)"),
}
"""Scores of which the graph has no product, and what is found instead of it."""


@pytest.mark.parametrize(("scores", "where"), GIVEN.values(), ids=GIVEN)
def test_scores_that_a_graph_is_given_are_named_as_its_input(scores: Function, where: str) -> None:
    def function(s: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scores(s, k, v, mask).softmax(-1) @ v

    given = torch.zeros(B, N, SQ, T), torch.zeros(B, N, SQ, T), torch.zeros(B, N, T, V), torch.zeros(SQ, T)
    (only,) = found(function, *given)
    assert isinstance(only, Refusal)
    assert only.reason == f"expected scores that are a sum of products, found {where}"
    assert only.remedy.startswith("bring the product of queries and keys into the graph") == ("placeholder" in where)


def test_a_graph_without_attention_has_none() -> None:
    assert found(lambda q, k, v: q @ k.mT @ v) == []
    assert found(lambda q, k, v: (q @ k.mT).softmax(-1)) == []
