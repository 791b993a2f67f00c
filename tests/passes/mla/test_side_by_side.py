"""Several columns of the keys that come from the latent of the values: they are one up-projection."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.mla.test_prove import site
from tests.passes.spellings import SCALE, Function, L, N, P, R

A, C = 3, 5
"""The widths of two parts of the keys."""


def inputs() -> tuple[Tensor, ...]:
    """The tensors of MLA without its queries; queries [B, N, Sq, A + C + R], and `[N, A, L]`, `[N, C, L]`, `[R, L]`."""
    generator = torch.Generator().manual_seed(5)
    shapes = (mla.B, N, mla.SQ, A + C + R), (N, A, L), (N, C, L), (R, L)
    more = [torch.randn(shape, generator=generator, dtype=torch.float64) / L**0.5 for shape in shapes]
    _, latent, k_rope, _, w_kv = mla.tensors()
    return latent, k_rope, w_kv, *more


def of_heads(latent: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("btl,npl->bntp", latent, weight)


def values(latent: Tensor, w_kv: Tensor) -> Tensor:
    return mla.up_projected(latent, w_kv)[1]


def rope_between(latent, k_rope, w_kv, q, a, c, _):
    k = torch.cat([of_heads(latent, a), mla.to_heads(k_rope), of_heads(latent, c)], -1)
    return mla.sealed(q, k, values(latent, w_kv))


def in_three_sums(latent, k_rope, w_kv, q, a, c, _):
    one, two, three = q.split([A, C, R], -1)
    scores = one @ of_heads(latent, a).mT * 2 + two @ of_heads(latent, c).mT + three @ mla.to_heads(k_rope).mT
    return (scores * SCALE).softmax(-1) @ values(latent, w_kv)


def shared_part(latent, _, w_kv, q, __, c, shared):
    """As in attention without rope: columns that would have one are made of the latent, for all heads alike."""
    k = torch.cat([mla.to_heads(latent @ shared.t()), of_heads(latent, c)], -1)
    return mla.sealed(q[..., A:], k, values(latent, w_kv))


def added_to_some_columns(latent, k_rope, w_kv, q, _, c, __):
    k = of_heads(latent, c)
    k = torch.cat([k[..., :R] + k_rope[:, None], k[..., R:]], -1)
    return mla.sealed(q[..., :C], k, values(latent, w_kv))


def padded_and_added(latent, k_rope, w_kv, q, _, c, __):
    k = of_heads(latent, c) + F.pad(k_rope, (1, C - R - 1))[:, None]
    return mla.softmax(q[..., :C], k, values(latent, w_kv))


def from_two_weights(latent, k_rope, w_kv, q, a, c, _):
    """Three parts, one of them from the weight of the values."""
    k = torch.cat([mla.up_projected(latent, w_kv)[0], of_heads(latent, a), of_heads(latent, c)], -1)
    return mla.sealed(torch.cat([q, q[..., : P - R]], -1), k, values(latent, w_kv))


def parts_of_the_values(latent, k_rope, w_kv, q, a, c, _):
    k_nope, v = mla.up_projected(latent, w_kv)
    k = torch.cat([k_nope, mla.to_heads(k_rope), v[..., :A]], -1)
    return mla.sealed(torch.cat([q, q], -1)[..., : P + R + A], k, v)


SPELLINGS = [
    *(rope_between, in_three_sums, added_to_some_columns, padded_and_added, from_two_weights, parts_of_the_values),
]


@pytest.mark.parametrize("function", SPELLINGS)
def test_parts_are_one_up_projection(function: Function) -> None:
    check_rewritten(function, inputs())


@pytest.mark.parametrize("function", [rope_between, added_to_some_columns, in_three_sums])
def test_sizes_may_be_unknown(function: Function) -> None:
    check_rewritten(function, inputs(), symbolic=[(0, 1), (0, 1), (), (0, 2)])


def test_a_part_that_heads_share_is_a_rope_key() -> None:
    check_rewritten(shared_part, inputs())
    assert (site(shared_part, *inputs()).sizes["P"], site(shared_part, *inputs()).sizes["R"]) == (C, R)


def test_columns_of_one_weight_are_read_in_one_piece() -> None:
    """What is added to some columns does not divide the weight."""
    proved = site(added_to_some_columns, *inputs())
    assert proved.w_uk is not None
    assert isinstance(proved.w_uk.source, torch.fx.Node)
    assert (proved.sizes["P"], proved.sizes["R"]) == (C, R)


def test_few_queries_are_multiplied_by_each_weight() -> None:
    """No copy of the weights is made, side by side."""
    ((_, module, _),) = compiled(rope_between, inputs(), paths=["absorbed"])
    made = [node for node in module.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert not [node for node in made if node.meta["val"].numel() == N * (A + C) * L]


def capped(latent, k_rope, w_kv, q, a, c, _):
    """A function of the sum of two products of the latent, each of which it takes as it is."""
    one, two, three = q.split([A, C, R], -1)
    scores = one @ of_heads(latent, a).mT + two @ of_heads(latent, c).mT + three @ mla.to_heads(k_rope).mT
    return scores.tanh().softmax(-1) @ values(latent, w_kv)


def test_parts_under_a_function_of_the_scores_stay_two() -> None:
    check_unchanged(capped, inputs())
    (outcome,) = rewrite(capture(capped, *inputs()))
    assert outcome.reason.startswith("expected one part of the keys to come from the latent of the values, found two")
