"""Values that are added to those of another latent: an up-projection of both latents side by side."""

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

M = 9
"""The width of the other latent."""


def inputs() -> tuple[Tensor, ...]:
    """`q` [B, N, Sq, P + R], `latent` [B, T, L], `k_rope` [B, T, R], `other` [B, T, M], `share` []; weights of keys and
    values, [N P, L] and [N V, L], and of what the other latent adds, [N P, M] and [N V, M]; a bias [N V]."""
    generator = torch.Generator().manual_seed(5)
    maps = (N * P, L), (N * V, L), (N * P, M), (N * V, M)
    shapes = (B, N, mla.SQ, P + R), (B, T, L), (B, T, R), (B, T, M), (), *maps, (N * V,)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *made[:5], *(weight / math.sqrt(weight.shape[-1]) for weight in made[5:])


def heads(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias).unflatten(-1, (N, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, attention: Function = mla.sealed) -> Tensor:
    return attention(q, torch.cat([k, mla.to_heads(k_rope)], -1), v)


def added(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    return attend(q, heads(latent, w_uk), k_rope, heads(latent, w_uv) + heads(other, w))


def mixed_by_a_number(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    v = 0.75 * heads(latent, w_uv) + 0.25 * heads(other, w)
    return attend(q, heads(latent, w_uk), k_rope, v, mla.softmax)


def mixed_by_what_is_learned(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    share = share.sigmoid()
    return attend(q, heads(latent, w_uk), k_rope, (1 - share) * heads(latent, w_uv) + share * heads(other, w))


def mixed_with_biases(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    v = share * heads(latent, w_uv, bias) + (1 - share) * heads(other, w, 2 * bias)
    return attend(q, heads(latent, w_uk, w_uk[:, 0]), k_rope, v)


def mixed_by_lerp(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    v = torch.lerp(heads(latent, w_uv), heads(other, w, bias), share.sigmoid())
    return attend(q, heads(latent, w_uk), k_rope, v)


def mixed_by_lerp_and_a_number(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    return attend(q, heads(latent, w_uk), k_rope, torch.lerp(heads(latent, w_uv), heads(other, w), 0.3), mla.softmax)


def mixed_in_each_head(q, latent, k_rope, other, share, w_uk, w_uv, _, w, bias):
    share = bias.view(N, V)[:, :1, None].sigmoid()
    return attend(q, heads(latent, w_uk), k_rope, heads(latent, w_uv) * share + heads(other, w) * (1 - share))


def added_to_keys_too(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    k, v = heads(latent, w_uk) + share * heads(other, w_k), heads(latent, w_uv) + share * heads(other, w)
    return attend(q, k, k_rope, v)


def added_to_keys_alone(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    return attend(q, heads(latent, w_uk) + share * heads(other, w_k), k_rope, heads(latent, w_uv))


def keys_beside_keys_of_the_other(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """Some columns of the keys come from either latent."""
    keys = torch.cat([heads(latent, w_uk[: 2 * N]), heads(other, w_k[: 2 * N])], -1)
    return attend(q, keys, k_rope, heads(latent, w_uv))


def gated_and_added(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """A factor of each token, on the keys and values of one latent."""
    gate = latent[:, None, :, :1].sigmoid()
    return attend(q, gate * heads(latent, w_uk), k_rope, gate * heads(latent, w_uv) + share * heads(other, w))


def mixed_by_a_gate(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """A share of each token."""
    gate = latent[:, None, :, :1].sigmoid()
    k = (1 - gate) * heads(latent, w_uk) + gate * heads(other, w_k)
    return attend(q, k, k_rope, (1 - gate) * heads(latent, w_uv) + gate * heads(other, w), mla.softmax)


def nearer_by_a_gate(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """The gate is on the difference, so that one latent has it and also does not."""
    gate, v = latent[:, None, :, :1].sigmoid(), heads(latent, w_uv)
    return attend(q, heads(latent, w_uk), k_rope, v + gate * (heads(other, w) - v))


def keys_of_the_other(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    return attend(q, heads(other, w_k), k_rope, heads(latent, w_uv) + heads(other, w))


def of_three(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    v = heads(latent, w_uv) + heads(other, w) + heads(k_rope, w_uv[:, :R])
    return attend(q, heads(latent, w_uk), k_rope, v)


def of_a_cache(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """Both caches grow by the same tokens."""
    latent, other = (torch.cat([x[:, :-2], 2 * x[:, -2:]], 1) for x in (latent, other))
    return attend(q, heads(latent, w_uk), k_rope, heads(latent, w_uv) + share * heads(other, w))


SPELLINGS = [
    *(mixed_by_lerp, mixed_by_lerp_and_a_number),
    *(added, mixed_by_a_number, mixed_by_what_is_learned, mixed_with_biases, mixed_in_each_head),
    *(added_to_keys_too, added_to_keys_alone, keys_beside_keys_of_the_other, keys_of_the_other),
    *(gated_and_added, mixed_by_a_gate, nearer_by_a_gate, of_three, of_a_cache),
]


@pytest.mark.parametrize("function", SPELLINGS)
def test_several_latents_are_one(function: Function) -> None:
    check_rewritten(function, inputs())
    assert site(function, *inputs()).sizes["L"] == L + M + {of_three: R, nearer_by_a_gate: L}.get(function, 0)


@pytest.mark.parametrize("function", [mixed_by_what_is_learned, added_to_keys_too])
def test_sizes_may_be_unknown(function: Function) -> None:
    check_rewritten(function, inputs(), symbolic=[(0, 2), *UNKNOWN[1:3], (0, 1)])


def test_keys_of_a_third_latent_stay_apart() -> None:
    def function(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
        return attend(q, heads(k_rope, w_uk[:, :R]), k_rope, heads(latent, w_uv) + heads(other, w))

    check_rewritten(function, inputs())
    sizes = site(function, *inputs()).sizes
    assert (sizes["L"], sizes["Lk"]) == (L + M, R)


def test_few_queries_are_multiplied_with_each_weight_as_it_is() -> None:
    """No weight is copied beside zeros, or beside the other's."""
    of_one = [part[:1] for part in inputs()[:4]]
    ((_, module, _),) = compiled(added, [*of_one, *inputs()[4:]], paths=["absorbed"])
    made = [node for node in module.graph.nodes if node.op == "call_function" and isinstance(node.meta["val"], Tensor)]
    assert not [node for node in made if node.meta["val"].numel() in (N * P * (L + M), N * V * (L + M))]


def values_in_head_space(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """What is added comes from no latent."""
    wide = latent.repeat(1, 1, N * V)[..., : N * V].unflatten(-1, (N, V)).transpose(1, 2)
    return attend(q, heads(latent, w_uk), k_rope, heads(latent, w_uv) + share * wide)


def mixed_by_key_and_head(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    """A share of each key and head, which neither latents nor weights can take."""
    share = latent[:, None, :, :1].sigmoid() ** torch.arange(1, N + 1)[:, None, None]
    v = share * heads(latent, w_uv) + (1 - share) * heads(other, w)
    return attend(q, heads(latent, w_uk), k_rope, v)


def multiplied(q, latent, k_rope, other, share, w_uk, w_uv, w_k, w, bias):
    return attend(q, heads(latent, w_uk), k_rope, heads(latent, w_uv) * heads(other, w))


@pytest.mark.parametrize("function", [values_in_head_space, mixed_by_key_and_head, multiplied])
def test_what_is_no_sum_of_up_projections_stays(function: Function) -> None:
    check_unchanged(function, inputs())
    (outcome,) = rewrite(capture(function, *inputs()))
    assert outcome.path == "unchanged"
