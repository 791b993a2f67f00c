"""Biased keys and values that one number of each key multiplies or sets to 0: the number is a column of the latent."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, check_unchanged, compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.mla.test_prove import site
from tests.passes.spellings import UNKNOWN, Function, L, N, P, T, V


def inputs() -> tuple[Tensor, ...]:
    """The tensors of MLA, and a bias of its up-projection."""
    return (*mla.tensors(), torch.arange(N * (P + V)).double().sin())


def gate(latent: Tensor) -> Tensor:
    return latent[..., :1].sigmoid()


def hidden(latent: Tensor) -> Tensor:
    return latent[..., :1] > 0.5


def biased(change: Function, to_values: Function = lambda v: v) -> Function:
    """MLA whose keys and values of all heads are `change(up, latent)`, where `up` has a bias."""

    def attention(x, latent, k_rope, w_q, w_kv, bias):
        up = change(latent @ w_kv + bias, latent).unflatten(-1, (N, P + V)).transpose(1, 2)
        k = torch.cat([up[..., :P], mla.to_heads(k_rope)], -1)
        return mla.sealed(mla.queries(x, w_q), k, to_values(up[..., P:]))

    return attention


def chosen(x, latent, k_rope, w_q, w_kv, bias):
    """Tokens of two kinds, each with a weight and a bias of its own."""
    ups = latent @ w_kv + bias, latent @ w_kv.sin() - bias.cos()
    up = torch.where(hidden(latent), *ups).unflatten(-1, (N, P + V)).transpose(1, 2)
    k = torch.cat([up[..., :P], mla.to_heads(k_rope)], -1)
    return mla.softmax(mla.queries(x, w_q), k, up[..., P:])


REWRITTEN: dict[str, Function] = {
    "a gate": biased(lambda up, c: up * gate(c)),
    "a gate, then a number": biased(lambda up, c: 0.5 * gate(c) * up),
    "a divisor": biased(lambda up, c: up / gate(c)),
    "a gate of a bias and a number": biased(lambda up, c: (up + 1.5) * gate(c)),
    "filled": biased(lambda up, c: up.masked_fill(hidden(c), 0)),
    "where": biased(lambda up, c: torch.where(hidden(c), up, 0)),
    "where not": biased(lambda up, c: torch.where(~hidden(c), torch.zeros_like(up), up)),
    "another bias after the gate": biased(lambda up, c: up * gate(c), lambda v: v + torch.arange(V).double()),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_the_number_of_each_key_is_a_column_of_the_latent(function: Function) -> None:
    check_rewritten(function, inputs())
    assert site(function, *inputs()).sizes["L"] == L + 1


def test_two_up_projections_with_biases_to_choose_from() -> None:
    check_rewritten(chosen, inputs())
    assert site(chosen, *inputs()).sizes["L"] == 2 * (L + 1)


@pytest.mark.parametrize("change", ["a gate", "filled"])
def test_sizes_may_be_unknown(change: str) -> None:
    check_rewritten(REWRITTEN[change], inputs(), UNKNOWN)


def test_values_alone() -> None:
    """Keys have the latent, values the gated latent and the gate."""

    def attention(x, latent, k_rope, w_q, w_kv, bias):
        k, v = (latent @ w_kv + bias).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k, mla.to_heads(k_rope)], -1)
        return mla.softmax(mla.queries(x, w_q), k, v * gate(latent)[:, None])

    for path, _, (outcome,) in compiled(attention, inputs()):
        assert (outcome.path, outcome.shapes["Lk"], outcome.shapes["L"]) == (path, str(L), str(L + 1))


def test_what_is_set_to_0_may_be_nan() -> None:
    x, latent, *rest = inputs()
    latent[:, 3] = math.nan
    function = biased(lambda up, c: up.masked_fill(torch.arange(T)[:, None] == 3, 0))
    module = capture(function, x, latent, *rest)
    before = run(module, x, latent, *rest)
    assert before.isfinite().all()
    assert [outcome.path for outcome in rewrite(module)] == ["absorbed"]
    check_right(before, run(module, x, latent, *rest))


UNCHANGED: dict[str, Function] = {
    "a gate of each key and column": biased(
        lambda up, c: up * c.mean(-1, keepdim=True) * torch.sin(up[0, 0] + c[..., :1])
    ),
    "another number than 0": biased(lambda up, c: up.masked_fill(hidden(c), 1.0)),
    "a bias of each key and column": biased(lambda up, c: (up + F.pad(c, (0, N * (P + V) - L))) * gate(c)),
    "a norm of each head": biased(lambda up, c: F.normalize(up.unflatten(-1, (N, -1)), dim=-1).flatten(-2)),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_other_changes_of_biased_keys_and_values(function: Function) -> None:
    check_unchanged(function, inputs())


def test_a_gate_of_each_head_and_key_is_none_of_the_latent() -> None:
    function = biased(lambda up, c: (up.unflatten(-1, (N, -1)) * c[..., :N, None]).flatten(-2))
    for _, _, outcomes in compiled(function, inputs()):
        assert not any(outcome.rewritten for outcome in outcomes)
