"""Queries to which each head adds a bias, as in Transformer-XL: before the product with the keys, or in another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.mla.test_prove import site
from tests.passes.spellings import SCALE, UNKNOWN, Function, N, P, R


def inputs() -> tuple[Tensor, ...]:
    """The tensors of MLA, and biases of the queries: `[N, P]` and `[N, R]`."""
    biases = torch.arange(N * (P + R)).double().sin().split([N * P, N * R])
    return (*mla.tensors(), biases[0].view(N, P), biases[1].view(N, R))


def scores_by(scores: Function) -> Function:
    def attention(x, latent, k_rope, w_q, w_kv, u, w):
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        k_nope, v = mla.up_projected(latent, w_kv)
        return scores(q_nope, q_rope, k_nope.mT, mla.to_heads(k_rope).mT, u[:, None], w[:, None]).softmax(-1) @ v

    return attention


@scores_by
def before(q_nope, q_rope, k_nope, k_rope, u, w):
    return ((q_nope + u) @ k_nope + (q_rope + w) @ k_rope) * SCALE


@scores_by
def in_products_of_their_own(q_nope, q_rope, k_nope, k_rope, u, w):
    return (q_nope @ k_nope + u @ k_nope + q_rope @ k_rope + w @ k_rope) * SCALE


@scores_by
def biases_first(q_nope, q_rope, k_nope, k_rope, u, w):
    return (u @ k_nope + w @ k_rope) * 0.3 - (q_nope @ k_nope + q_rope @ k_rope) * SCALE


@scores_by
def of_nope_keys_alone(q_nope, q_rope, k_nope, k_rope, u, w):
    return (q_nope @ k_nope + u @ k_nope + q_rope @ k_rope) * SCALE


SPELLINGS = [before, in_products_of_their_own, biases_first, of_nope_keys_alone]


@pytest.mark.parametrize("function", SPELLINGS)
def test_biases_are_added_to_the_queries(function: Function) -> None:
    check_rewritten(function, inputs())
    assert {name: site(function, *inputs()).sizes[name] for name in "PR"} == {"P": P, "R": R}


def test_sizes_may_be_unknown() -> None:
    check_rewritten(in_products_of_their_own, inputs(), UNKNOWN)


def test_sums_of_queries_have_the_dtype_of_queries() -> None:
    module = capture(in_products_of_their_own, *(half := [tensor.bfloat16() for tensor in inputs()]))
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    (op,) = module.graph.find_nodes(op="call_function", target=torch.ops.mla.latent_attention.default)
    assert {argument.meta["val"].dtype for argument in op.all_input_nodes} == {torch.bfloat16}
    exact = in_products_of_their_own(*(tensor.double() for tensor in half))
    assert_as_close_as_eager(run(module, *half), in_products_of_their_own(*half), exact)


@scores_by
def of_other_columns(q_nope, q_rope, k_nope, k_rope, u, w):
    return (q_nope @ k_nope + u @ k_nope.flip(-2) + q_rope @ k_rope) * SCALE


@scores_by
def of_tokens_before(q_nope, q_rope, k_nope, k_rope, u, w):
    return (q_nope @ k_nope + u @ k_nope.roll(1, -1) + q_rope @ k_rope) * SCALE


@scores_by
def under_a_function(q_nope, q_rope, k_nope, k_rope, u, w):
    """The scores of one query are capped, those of the other are not: they cannot be added before."""
    return (q_nope @ k_nope).tanh() + u @ k_nope + q_rope @ k_rope


@pytest.mark.parametrize("function", [of_other_columns, of_tokens_before, under_a_function])
def test_keys_that_are_not_the_same_stay_apart(function: Function) -> None:
    """Those of other columns or tokens are keys that each head has for itself."""
    for _, _, outcomes in compiled(function, inputs()):
        assert all(outcome.shapes.get("P") in (None, str(P)) for outcome in outcomes)
