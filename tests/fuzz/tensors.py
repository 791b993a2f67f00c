"""MLA with random changes of its tensors, wherever one stands on the way from its inputs to its output."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from tests.passes.spellings import sealed

from .changes import NUMBERS, ChangeChoices
from .drawing import SCALE, Program, Sizes

SIZES = (
    Sizes(2, 3, 6, 4, rank=6, nope=4, rope=2, value=4),
    Sizes(2, 4, 4, 4, rank=4, nope=4, rope=4, value=4),
    Sizes(1, 1, 6, 2, rank=6, nope=2, rope=2, value=2),
    Sizes(2, 2, 8, 2, rank=4, nope=2, rope=2, value=2),
    Sizes(3, 3, 6, 3, rank=6, nope=3, rope=3, value=3),
)


def program(seed: int) -> Program:
    """An attention with the changes of a seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = SIZES[seed % len(SIZES)]
    numbers = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, numbers: Tensor) -> Tensor:
        draw = ChangeChoices(Random(seed), numbers)
        latent, k_rope, w_kv = draw.maybe(latent, 0.3), draw.maybe(k_rope), draw.maybe(w_kv, 0.15)
        k_nope, v = draw.one_of(UP_PROJECTIONS, sizes, latent, w_kv)
        k_nope, v = draw.maybe(k_nope), draw.maybe(v)
        k_rope = draw.maybe(sizes.to_heads(k_rope), 0.15)
        q = draw.maybe(sizes.queries_of(x, w_q), 0.15)
        return draw.maybe(draw.one_of(ATTENTIONS, sizes, q, k_nope, k_rope, v), 0.1)

    return Program(function, (*sizes.tensors(generator), numbers))


# From the latent to keys [B, N, T, P] and values [B, N, T, V]


def together(draw: ChangeChoices, sizes: Sizes, latent: Tensor, w_kv: Tensor) -> tuple[Tensor, ...]:
    return draw.maybe(sizes.up_projected(latent, w_kv), 0.15).split([sizes.nope, sizes.value], -1)


def apart(draw: ChangeChoices, sizes: Sizes, latent: Tensor, w_kv: Tensor) -> tuple[Tensor, ...]:
    """One weight for keys and one for values, `[N, P, L]` and `[N, V, L]`; both are changed, and the latent of each."""
    weights = w_kv.t().view(sizes.heads, -1, sizes.rank).split([sizes.nope, sizes.value], 1)
    pairs = [(draw.maybe(latent, 0.1), draw.maybe(weight, 0.15)) for weight in weights]
    if draw.happens(0.5):
        return tuple(torch.einsum("btl,nal->bnta", *pair) for pair in pairs)
    return tuple(latent[:, None] @ weight.mT for latent, weight in pairs)


UP_PROJECTIONS = (together, apart)


# Attentions


def sdpa(draw: ChangeChoices, sizes: Sizes, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor) -> Tensor:
    k = draw.maybe(torch.cat([k_nope, k_rope], -1), 0.12)
    return sealed(q, k, v, causal=draw.happens(0.3))


def one_score(draw: ChangeChoices, sizes: Sizes, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor) -> Tensor:
    k = draw.maybe(torch.cat([k_nope, k_rope], -1), 0.12)
    return by_hand(draw, sizes, q @ k.mT, v)


def two_scores(draw: ChangeChoices, sizes: Sizes, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor) -> Tensor:
    q_nope, q_rope = q.split([sizes.nope, sizes.rope], -1)
    return by_hand(draw, sizes, q_nope @ k_nope.mT + q_rope @ k_rope.mT, v)


ATTENTIONS = (sdpa, one_score, one_score, two_scores)


def by_hand(draw: ChangeChoices, sizes: Sizes, scores: Tensor, v: Tensor) -> Tensor:
    """A softmax of changed scores under one of `MASKS`, and changed weights times values."""
    scores = draw.one_of(MASKS, sizes, draw.maybe(scores * SCALE, 0.12))
    return draw.maybe(scores.softmax(-1), 0.08) @ v


def unmasked(draw: ChangeChoices, sizes: Sizes, scores: Tensor) -> Tensor:
    return scores


def causal(draw: ChangeChoices, sizes: Sizes, scores: Tensor) -> Tensor:
    hidden = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool).triu(sizes.keys - sizes.queries + 1)
    return scores.masked_fill(hidden, -math.inf)


def bias_of_keys(draw: ChangeChoices, sizes: Sizes, scores: Tensor) -> Tensor:
    return scores + draw.constants(sizes.batch, 1, 1, sizes.keys)


MASKS = (unmasked, unmasked, causal, bias_of_keys)
