"""Tokens that are chosen from up-projected keys and values are chosen from the latents instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_unchanged, compiled, elements
from tests.passes.spellings import SQ, Function, N, P, T, V

TOPK = 4
Choose = Callable[[Tensor, Tensor], Tensor]
"""Chooses tokens from `[B, T, N, columns]` by their names."""


def named_tensors() -> tuple[Tensor, ...]:
    """`mla.tensors()`, and the names of the tokens that each query attends to, `[B, Sq, TOPK]`: some from the end, some
    more than once."""
    x, latent, *others = mla.tensors()
    names = torch.randint(-T, T, (*x.shape[:2], TOPK), generator=torch.Generator().manual_seed(1))
    names[0, 0, 1] = names[0, 0, 0]
    return x, latent, *others, names


def keys_and_values(latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, N, P + R]` and `[B, T, N, V]`."""
    nope, v = mla.up_projected(latent, w_kv)
    return torch.cat([nope, mla.to_heads(k_rope)], -1).transpose(1, 2), v.transpose(1, 2)


def of_each_query(choose: Choose, choose_values: Choose | None = None) -> Function:
    """Attention of each query to the tokens that it names."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, names: Tensor) -> Tensor:
        k, v = keys_and_values(latent, k_rope, w_kv)
        k, v = choose(k, names), (choose_values or choose)(v, names)
        scores = torch.einsum("bnsd,bsknd->bsnk", mla.queries(x, w_q), k) * mla.SCALE
        return torch.einsum("bsnk,bsknv->bsnv", scores.softmax(-1), v)

    return attention


def of_all_queries(choose: Choose) -> Function:
    """Attention of all queries of a sequence to the same tokens, `[B, some, N, columns]`."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, names: Tensor) -> Tensor:
        k, v = (choose(tensor, names).transpose(1, 2) for tensor in keys_and_values(latent, k_rope, w_kv))
        return mla.softmax(mla.queries(x, w_q), k, v)

    return attention


def sequences(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0])[(...,) + (None,) * (like.dim() - 1)]


def gathered(tensor: Tensor, names: Tensor) -> Tensor:
    """By `gather`, whose index is repeated for every column."""
    names = (names % T)[..., None, None].expand(-1, -1, -1, *tensor.shape[2:])
    return tensor[:, None].expand(-1, SQ, -1, -1, -1).gather(2, names)


REWRITTEN: dict[str, Function] = {
    "by sequences and names": of_each_query(lambda tensor, names: tensor[sequences(names), names]),
    "by gather": of_each_query(gathered),
    "of a sequence": of_all_queries(lambda tensor, names: tensor[sequences(names[:, 0]), names[:, 0]]),
    "the same of all sequences": of_all_queries(lambda tensor, names: tensor[:, names[0, 0]]),
    "by index_select": of_all_queries(lambda tensor, names: tensor.index_select(1, names[0, 0] % T)),
    "the heads first": of_all_queries(lambda tensor, names: tensor.transpose(1, 2)[:, :, names[0, 0]].transpose(1, 2)),
    "more than there are": of_all_queries(lambda tensor, names: tensor[:, names.flatten()]),
    "of other sequences": of_all_queries(lambda tensor, names: tensor[names[0, 0, :2] % 2]),
    "other tokens for the values": of_each_query(
        lambda tensor, names: tensor[sequences(names), names],
        lambda tensor, names: tensor[sequences(names), names.flip(1)],
    ),
    "with a bias": of_all_queries(
        lambda tensor, names: (tensor + torch.arange(tensor.shape[-1]) / 8)[sequences(names[:, 0]), names[:, 0]]
    ),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_tokens_are_looked_up_in_latents(function: Function) -> None:
    for path, module, outcomes in compiled(function, named_tensors()):
        assert [outcome.path for outcome in outcomes] == [path]
        lookups = [node for node in module.graph.nodes if "index" in str(node.target) or "gather" in str(node.target)]
        assert lookups
        assert not any(elements(node.meta["val"]) % N == 0 for node in lookups)


def values_of_keys(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, names: Tensor) -> Tensor:
    """Values are a product of what the keys are, too, which is computed once more: the two lookups read one product."""
    w_v = torch.linspace(-1, 1, w_kv.shape[1] * N * V, dtype=latent.dtype).sin().view(-1, N * V)
    k, v = (latent @ w_kv).unflatten(-1, (N, P + V))[..., :P], ((latent @ w_kv) @ w_v).unflatten(-1, (N, V))
    k, v = (tensor[:, names[0, 0]].transpose(1, 2) for tensor in (k, v))
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


def test_a_lookup_of_what_another_one_no_longer_needs() -> None:
    for path, _, outcomes in compiled(values_of_keys, named_tensors()):
        assert [outcome.path for outcome in outcomes] == [path]


@pytest.mark.parametrize("name", ["by sequences and names", "by gather", "the same of all sequences"])
def test_sizes_that_are_not_known(name: str) -> None:
    for path, _, outcomes in compiled(REWRITTEN[name], named_tensors(), [(0, 1), (0, 1), (0, 1)]):
        assert [outcome.path for outcome in outcomes] == [path]


def by_heads(tensor: Tensor, names: Tensor) -> Tensor:
    """Other tokens for each head."""
    names = (names[:, :, :, None] + torch.arange(N)) % T
    return tensor[:, None].expand(-1, SQ, -1, -1, -1).gather(2, names[..., None].expand(*names.shape, tensor.shape[-1]))


UNCHANGED: dict[str, Function] = {
    "other tokens for each head": of_each_query(by_heads),
    "a function of what is looked up": of_each_query(lambda tensor, names: tensor[sequences(names), names].tanh()),
    "a function of what is up-projected": of_each_query(lambda tensor, names: tensor.tanh()[sequences(names), names]),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_other_lookups_stay(function: Function) -> None:
    check_unchanged(function, named_tensors())


@pytest.mark.usefixtures("without_codegen")
def test_compiled() -> None:
    *tensors, names = named_tensors()
    given, function = [t.float() for t in tensors], REWRITTEN["by sequences and names"]
    exact = function(*(t.double() for t in given), names)
    o = torch.compile(function, backend="mla", options={"mla.strict": True})(*given, names)
    eager = (function(*given, names).double() - exact).abs().max()
    assert (o.double() - exact).abs().max() <= 4 * eager
