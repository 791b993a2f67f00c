"""Two linear maps in a row, the first of which has heads: they are one up-projection of what comes before both."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.mla.test_prove import site
from tests.passes.spellings import UNKNOWN, B, Function, L, N, P, R, T, V

M = 3
"""The width of what lies between the two maps."""


def inputs() -> tuple[Tensor, ...]:
    """`q` [B, N, Sq, P + R], `latent` [B, T, L], `k_rope` [B, T, R]; for keys and for values a map to what lies
    between, [N, M, L], a map from there, [N, P, M] and [N, V, M], and biases of both, [N, M] and [N, P] or [N, V]."""
    generator = torch.Generator().manual_seed(4)
    maps = [shape for width in (P, V) for shape in ((N, M, L), (N, width, M), (N, M), (N, width))]
    shapes = (B, N, mla.SQ, P + R), (B, T, L), (B, T, R), *maps
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *made[:3], *(part / math.sqrt(part.shape[-1]) for part in made[3:])


def attend(q: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, attention: Function = mla.sealed) -> Tensor:
    return attention(q, torch.cat([k, mla.to_heads(k_rope)], -1), v)


def dense_first(latent: Tensor, first: Tensor) -> Tensor:
    """`[B, N, T, M]`, from one matrix of all heads."""
    return (latent @ first.flatten(0, 1).t()).unflatten(-1, first.shape[:2]).transpose(1, 2)


def matmul(q, latent, k_rope, *maps):
    a, b, _, _, c, d, *_ = maps
    return attend(q, dense_first(latent, a) @ b.mT, k_rope, dense_first(latent, c) @ d.mT)


def einsum(q, latent, k_rope, *maps):
    a, b, _, _, c, d, *_ = maps
    k = torch.einsum("bntm,npm->bntp", torch.einsum("btl,nml->bntm", latent, a), b)
    v = torch.einsum("btl,nml,nvm->bntv", latent, c, d)
    return attend(q, k, k_rope, v, mla.softmax)


def stacked(q, latent, k_rope, *maps):
    """A module for each head, of two layers without biases."""
    a, b, _, _, c, d, *_ = (part.unbind() for part in maps)
    k = torch.stack([latent @ x.t() @ y.t() for x, y in zip(a, b, strict=True)], 1)
    v = torch.stack([latent @ x.t() @ y.t() for x, y in zip(c, d, strict=True)], 1)
    return attend(q, k, k_rope, v)


def of_layers(latent: Tensor, *maps: Tensor) -> list[Tensor]:
    """For each head, a layer with a bias after another, `[B, T, P]`."""
    heads = zip(*(part.unbind() for part in maps), strict=True)
    return [F.linear(F.linear(latent, first, bias), second, other) for first, second, bias, other in heads]


def stacked_with_biases(q, latent, k_rope, *maps):
    k, v = (torch.stack(of_layers(latent, *own), 1) for own in (maps[:4], maps[4:]))
    return attend(q, k, k_rope, v, mla.softmax)


def concatenated_with_biases(q, latent, k_rope, *maps):
    k, v = (torch.cat(of_layers(latent, *own), -1) for own in (maps[:4], maps[4:]))
    k, v = (heads.unflatten(-1, (N, -1)).transpose(1, 2) for heads in (k, v))
    return attend(q, k, k_rope, v)


def keys_alone(q, latent, k_rope, *maps):
    a, b, _, _, c, *_ = maps
    return attend(q, dense_first(latent, a) @ b.mT, k_rope, dense_first(latent, c))


def values_alone(q, latent, k_rope, *maps):
    _, b, _, _, c, d, *_ = maps
    return attend(q, torch.einsum("btl,nml,npm->bntp", latent, c, b), k_rope, dense_first(latent, c) @ d.mT)


def from_one_intermediate(q, latent, k_rope, *maps):
    """Keys and values are made of one tensor of each head."""
    a, b, bias, _, _, d, *_ = maps
    between = dense_first(latent, a) + bias[:, None]
    return attend(q, between @ b.mT, k_rope, between @ d.mT)


def of_all_heads(q, latent, k_rope, *maps):
    """The second maps are one for all heads."""
    a, b, _, _, c, d, *_ = maps
    return attend(q, dense_first(latent, a) @ b[0].t(), k_rope, dense_first(latent, c) @ d[0].t())


def three(q, latent, k_rope, *maps):
    a, b, _, _, c, d, *_ = maps
    k = dense_first(latent, a) @ (b.mT @ b) @ b.mT
    return attend(q, k, k_rope, (dense_first(latent, c) * 3) @ d.mT)


def before_and_after(q, latent, k_rope, *maps):
    """Of cached and of new tokens separately, in two calls."""
    a, b, _, _, c, d, *_ = maps
    parts = latent.split([T - 2, 2], dim=1)
    k, v = (torch.cat([dense_first(part, x) @ y.mT for part in parts], 2) for x, y in ((a, b), (c, d)))
    return attend(q, k, k_rope, v)


def of_two_latents(q, latent, k_rope, *maps):
    """What lies between is made of the token before, too."""
    a, b, _, _, c, d, *_ = maps
    k, v = ((dense_first(latent, x) + dense_first(latent.roll(1, 1), x)) @ y.mT for x, y in ((a, b), (c, d)))
    return attend(q, k, k_rope, v)


SPELLINGS = [
    *(matmul, einsum, stacked, stacked_with_biases, concatenated_with_biases, keys_alone, values_alone),
    *(from_one_intermediate, of_all_heads, three, before_and_after, of_two_latents),
]


@pytest.mark.parametrize("function", SPELLINGS)
def test_two_maps_are_one_up_projection(function: Function) -> None:
    check_rewritten(function, inputs())


@pytest.mark.parametrize("function", [matmul, stacked_with_biases])
def test_sizes_may_be_unknown(function: Function) -> None:
    check_rewritten(function, inputs(), symbolic=[(0, 2), *UNKNOWN[1:]])


@pytest.mark.parametrize("function", [matmul, stacked_with_biases, of_all_heads, from_one_intermediate])
def test_the_latent_is_what_comes_before_both(function: Function) -> None:
    proved = site(function, *inputs())
    assert (proved.sizes["L"], proved.sizes["P"], proved.groups) == (L, P, None)


def one_map_with_biases(q, latent, k_rope, *maps):
    _, _, _, bias, c, _, _, other = maps
    k = torch.stack([F.linear(latent, *own) for own in zip(c.repeat(1, 2, 1)[:, 1 : P + 1], bias, strict=True)], 1)
    v = torch.stack([F.linear(latent, *own) for own in zip(c.repeat(1, 2, 1), other, strict=True)], 1)
    return attend(q, k, k_rope, v)


def test_a_layer_for_each_head_is_one_layer() -> None:
    """However many heads there are: they are no groups with a latent each."""
    check_rewritten(one_map_with_biases, inputs())
    assert site(one_map_with_biases, *inputs()).groups is None


@pytest.mark.parametrize("function", [matmul, stacked])
def test_few_queries_go_through_one_map_after_the_other(function: Function) -> None:
    """The product of the maps is nowhere: it would take N P M L multiply-adds in every call."""
    of_one = [part[:1] for part in inputs()[:3]]
    ((_, module, _),) = compiled(function, [*of_one, *inputs()[3:]], paths=["absorbed"])
    made = [node for node in module.graph.nodes if node.op == "call_function" and isinstance(node.meta["val"], Tensor)]
    assert not [node for node in made if node.meta["val"].numel() in (N * P * L, N * V * L)]


def between_heads(q, latent, k_rope, *maps):
    """All heads share what lies between: that is the latent."""
    a, b, _, _, _, d, *_ = maps
    between = latent @ a[0].t()
    return attend(q, torch.einsum("btm,npm->bntp", between, b), k_rope, torch.einsum("btm,nvm->bntv", between, d))


def test_an_intermediate_of_all_heads_is_a_latent() -> None:
    check_rewritten(between_heads, inputs())
    assert site(between_heads, *inputs()).sizes["L"] == M


def mixed(*, keys: bool, values: bool, bias: bool = False, rope: bool = True) -> Function:
    """A matrix that mixes all heads comes after an up-projection, for keys and for values that are of one width."""

    def function(q, latent, k_rope, *maps):
        a, b, bias_a, bias_b, *_ = maps
        mix = (b.flatten()[: N * M] + torch.eye(N * M, dtype=b.dtype)) / N
        between = [dense_first(latent, each) for each in (a, a.flip(-1))]
        if bias:
            between = [each + own[:, None] for each, own in zip(between, (bias_a, bias_b[:, :M]), strict=True)]
        flat = [each.transpose(1, 2).flatten(2) for each in between]
        flat = [each @ mix if mixes else each for each, mixes in zip(flat, (keys, values), strict=True)]
        k, v = (each.unflatten(-1, (N, M)).transpose(1, 2) for each in flat)
        q = q[..., : M + R if rope else M]
        return attend(q, k, k_rope, v) if rope else mla.sealed(q, k, v)

    return function


def of_values_from_keys(q, latent, k_rope, *maps):
    """Values are made of the keys of all heads."""
    a, b, *_ = maps
    keys = dense_first(latent, a)
    mix = b.flatten()[: N * M] + torch.eye(N * M, dtype=b.dtype)
    v = (keys.transpose(1, 2).flatten(2) @ mix).unflatten(-1, (N, M)).transpose(1, 2)
    return attend(q[..., : M + R], keys, k_rope, v)


def of_all_heads_twice(q, latent, k_rope, *maps):
    """Values go through all heads, and then through fewer columns that are still twice those of the latent."""
    a, *_ = maps
    first = torch.linspace(-1, 1, N * M * 2 * L, dtype=a.dtype).view(N * M, 2 * L)
    second = torch.linspace(1, -1, N * M * 2 * L, dtype=a.dtype).view(2 * L, N * M)
    keys = dense_first(latent, a)
    v = (keys.transpose(1, 2).flatten(2) @ first @ second).unflatten(-1, (N, M)).transpose(1, 2)
    return attend(q[..., : M + R], keys, k_rope, v)


MIXED = {
    "keys": mixed(keys=True, values=False),
    "values": mixed(keys=False, values=True),
    "both": mixed(keys=True, values=True),
    "both, no rope": mixed(keys=True, values=True, rope=False),
    "keys, no rope": mixed(keys=True, values=False, rope=False),
    "both with biases": mixed(keys=True, values=True, bias=True),
    "values from keys": of_values_from_keys,
    "twice": of_all_heads_twice,
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_an_intermediate_of_all_heads_that_is_wider_is_none(function: Function) -> None:
    check_rewritten(function, inputs())
    assert site(function, *inputs()).sizes["L"] == L


def test_an_intermediate_that_is_hardly_wider_is_a_latent() -> None:
    def function(q, latent, k_rope, *maps):
        a, b, *_ = maps
        return between_heads(q, latent[..., :2], k_rope, a[..., :2], b, *maps[2:])

    check_rewritten(function, inputs())
    assert site(function, *inputs()).sizes["L"] == M


@pytest.mark.parametrize("name", ["both", "values from keys"])
def test_few_queries_go_through_the_intermediate_of_all_heads(name: str) -> None:
    """What all tokens have there is not computed."""
    of_one = [part[:1] for part in inputs()[:3]]
    ((_, module, _),) = compiled(MIXED[name], [*of_one, *inputs()[3:]], paths=["absorbed"])
    made = [node for node in module.graph.nodes if node.op == "call_function" and isinstance(node.meta["val"], Tensor)]
    assert not [node for node in made if node.meta["val"].numel() == N * M * T]


def with_a_nonlinearity(q, latent, k_rope, *maps):
    a, b, _, _, c, d, *_ = maps
    return attend(q, dense_first(latent, a).relu() @ b.mT, k_rope, dense_first(latent, c).relu() @ d.mT)


def with_a_norm(q, latent, k_rope, *maps):
    a, b, _, _, c, d, *_ = maps
    k, v = (F.rms_norm(dense_first(latent, x), (M,)) @ y.mT for x, y in ((a, b), (c, d)))
    return attend(q, k, k_rope, v)


def of_tokens(q, latent, k_rope, *maps):
    """The second maps differ between tokens."""
    a, b, _, _, c, d, *_ = maps
    token = latent[:, None, :, :1, None]
    k, v = ((dense_first(latent, x)[..., None, :] @ (y[:, None].mT * token))[..., 0, :] for x, y in ((a, b), (c, d)))
    return attend(q, k, k_rope, v)


@pytest.mark.parametrize("function", [with_a_nonlinearity, with_a_norm, of_tokens])
def test_what_is_not_linear_in_one_latent_stays(function: Function) -> None:
    check_unchanged(function, inputs())
    (outcome,) = rewrite(capture(function, *inputs()))
    assert outcome.path == "unchanged"
