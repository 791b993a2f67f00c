"""Keys and values that are joined of products: of a prompt that all sequences begin with and the tokens of each
sequence, and of columns that do not lie side by side in one product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.algebra.test_joined_products import CUT
from tests.passes.checks import check_rewritten, check_unchanged, compiled
from tests.passes.mla.test_prove import site
from tests.passes.spellings import UNKNOWN, Function, L, P, R, T

Pair = tuple[Tensor, Tensor]


def inputs() -> tuple[Tensor, ...]:
    """The tensors of MLA, T tokens of which are some of the prompt and then those of each sequence."""
    x, latent, k_rope, w_q, w_kv = mla.tensors()
    prompt = latent[:1, :CUT].cos(), k_rope[:1, :CUT].sin()
    return x, latent[:, CUT:], k_rope[:, CUT:], w_q, w_kv, *prompt


def joined(prompt: Tensor, own: Tensor, dim: int = 2) -> Tensor:
    return torch.cat([prompt.expand(own.shape[0], *prompt.shape[1:]), own], dim)


def latents(x, latent, k_rope, w_q, w_kv, prompt, rope):
    return mla.combined(x, joined(prompt, latent, 1), joined(rope, k_rope, 1), w_q, w_kv)


def up_projected(x, latent, k_rope, w_q, w_kv, prompt, rope):
    """The rope keys are joined by themselves."""
    pairs = zip(mla.up_projected(prompt, w_kv), mla.up_projected(latent, w_kv), strict=True)
    k_nope, v = (joined(*pair) for pair in pairs)
    k = torch.cat([k_nope, mla.to_heads(joined(rope, k_rope, 1))], -1)
    return mla.sealed(mla.queries(x, w_q), k, v)


def whole_keys(x, latent, k_rope, w_q, w_kv, prompt, rope):
    q, *own = mla.naive(x, latent, k_rope, w_q, w_kv)
    _, *of_prompt = mla.naive(x, prompt, rope, w_q, w_kv)
    return mla.softmax(q, *(joined(*pair) for pair in zip(of_prompt, own, strict=True)))


def with_biases(x, latent, _, w_q, w_kv, prompt, __):
    bias = torch.arange(w_kv.shape[1]).double() / 50
    both = [(each @ w_kv + bias).unflatten(-1, (mla.N, -1)).transpose(1, 2) for each in (prompt, latent)]
    k, v = joined(*both).split([P, mla.V], -1)
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


def between(x, latent, _, w_q, w_kv, prompt, __):
    """The prompt stands between tokens of each sequence."""
    before, _, behind = (each.sin() for each in latent.split([2, 1, T - CUT - 3], 1))
    parts = [mla.up_projected(each, w_kv) for each in (before, prompt, behind)]
    sizes = [x.shape[0], -1, -1, -1]
    k, v = (torch.cat([a, b.expand(sizes), c], 2) for a, b, c in zip(*parts, strict=True))
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


def repeated(x, latent, k_rope, w_q, w_kv, prompt, rope):
    q, *own = mla.naive(x, latent, k_rope, w_q, w_kv)
    _, *of_prompt = mla.naive(x, prompt, rope, w_q, w_kv)
    pairs = zip(of_prompt, own, strict=True)
    return mla.softmax(q, *(torch.cat([a.repeat(x.shape[0], 1, 1, 1), b], 2) for a, b in pairs))


@pytest.mark.parametrize("function", [latents, up_projected, whole_keys, with_biases, repeated])
def test_a_prompt_of_all_sequences(function: Function) -> None:
    check_rewritten(function, inputs())


def test_a_prompt_between_other_tokens() -> None:
    for path, _, (outcome,) in compiled(between, inputs()):
        assert outcome.path == path


@pytest.mark.parametrize("function", [up_projected, whole_keys])
def test_batch_and_lengths_may_be_unknown(function: Function) -> None:
    check_rewritten(function, inputs(), [*UNKNOWN, (), (), (1,), (1,)])


def test_the_latent_is_no_wider() -> None:
    assert {name: site(whole_keys, *inputs()).sizes[name] for name in "PRLT"} == {"P": P, "R": R, "L": L, "T": T}


def with_another_weight(x, latent, _, w_q, w_kv, prompt, __):
    of_prompt, own = mla.up_projected(prompt, w_kv.roll(1, 1)), mla.up_projected(latent, w_kv)
    k, v = (joined(*pair) for pair in zip(of_prompt, own, strict=True))
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


def normed(x, latent, _, w_q, w_kv, prompt, __):
    """Keys and values of the prompt alone are normed by head."""
    of_prompt, own = mla.up_projected(prompt, w_kv), mla.up_projected(latent, w_kv)
    k, v = (joined(a / a.norm(dim=-1, keepdim=True), b) for a, b in zip(of_prompt, own, strict=True))
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


@pytest.mark.parametrize("function", [with_another_weight, normed])
def test_a_prompt_that_is_made_otherwise(function: Function) -> None:
    check_unchanged(function, inputs())


def test_values_of_the_prompt_behind_those_of_each_sequence() -> None:
    """Keys and values are each an up-projection, of latents in another order."""

    def attention(x, latent, _, w_q, w_kv, prompt, __):
        of_prompt, own = mla.up_projected(prompt, w_kv), mla.up_projected(latent, w_kv)
        v = torch.cat([own[1], of_prompt[1].expand(x.shape[0], -1, -1, -1)], 2)
        return mla.softmax(mla.queries(x, w_q)[..., :P], joined(of_prompt[0], own[0]), v)

    for path, _, (outcome,) in compiled(attention, inputs()):
        assert (outcome.path, outcome.shapes["Lk"]) == (path, outcome.shapes["L"])


def values(change: Function, bias: float = 0.0) -> Function:
    """MLA whose values are `change` of the columns `[B, N, T, P + V]` of keys and values."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        up = latent @ w_kv
        up = (up + bias * torch.arange(w_kv.shape[1]).double() if bias else up).unflatten(-1, (mla.N, P + mla.V))
        up = up.transpose(1, 2)
        k = torch.cat([up[..., 2 : P + 2], mla.to_heads(k_rope)], -1)
        return mla.softmax(mla.queries(x, w_q), k, change(up))

    return attention


def around(up: Tensor) -> Tensor:
    return torch.cat([up[..., :2], up[..., P + 2 :]], -1)


COLUMNS: dict[str, Function] = {
    "around those of keys": values(around),
    "with biases": values(around, bias=0.1),
    "in another order": values(lambda up: torch.cat([up[..., P:], up[..., :2]], -1)),
    "a single one": values(lambda up: torch.cat([up[..., -1:], up[..., P:-1]], -1)),
    "in three parts": values(lambda up: torch.cat([up[..., 6:8], up[..., :2], up[..., -2:]], -1)),
    "that overlap": values(lambda up: torch.cat([up[..., 5:9], up[..., 4:7]], -1)),
    "with a number on both": values(lambda up: around(up) * 0.5),
}


@pytest.mark.parametrize("function", COLUMNS.values(), ids=COLUMNS)
def test_columns_of_values_that_lie_apart(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def test_columns_that_lie_apart_of_unknown_sizes() -> None:
    check_rewritten(COLUMNS["around those of keys"], mla.tensors(), UNKNOWN)


def test_tokens_that_lie_apart() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.sealed(q, *(torch.cat([each[:, :, :2], each[:, :, 5:]], 2) for each in (k, v)))

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert (outcome.path, outcome.shapes["T"]) == (path, str(T - 3))


def test_keys_of_later_tokens_than_values() -> None:
    """The latent of the keys is that of the values in another order of tokens."""

    def attention(x: Tensor, latent: Tensor, _: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k, v = mla.up_projected(latent, w_kv)
        return mla.softmax(mla.queries(x, w_q)[..., :P], torch.cat([k[:, :, 1:], k[:, :, :1]], 2), v)

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert (outcome.path, outcome.shapes["Lk"]) == (path, outcome.shapes["L"])


OTHERS: dict[str, Function] = {
    "turned as by a rope": values(lambda up: torch.cat([-up[..., P + 2 :], up[..., :2]], -1)),
    "a norm of one part": values(lambda up: torch.cat([up[..., :2].softmax(-1), up[..., P + 2 :]], -1)),
    "other tokens in one part": values(lambda up: torch.cat([up[..., :2], up[..., P + 2 :].flip(2)], -1)),
    "other heads in one part": values(lambda up: torch.cat([up[..., :2], up[..., P + 2 :].roll(1, 1)], -1)),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_columns_of_values_that_are_changed_apart(function: Function) -> None:
    check_unchanged(function, mla.tensors())
