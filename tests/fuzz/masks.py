"""MLA under random masks: conditions that keep scores, fill them, or are added to them as numbers."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from tests.passes.spellings import sealed

from .conditions import MaskChoices
from .drawing import SCALE, Program, Sizes

SIZES = (
    Sizes(2, 3, 7, 3, rank=5, nope=4, rope=2, value=4),
    Sizes(2, 4, 4, 4, rank=5, nope=4, rope=2, value=4),
    Sizes(1, 1, 6, 2, rank=5, nope=2, rope=2, value=2),
    Sizes(2, 2, 8, 2, rank=5, nope=2, rope=2, value=2),
    Sizes(3, 3, 3, 3, rank=5, nope=2, rope=2, value=3),
)
FILLS = (-math.inf, -math.inf, -1e30, -1e18, -1e9, -1e4)
"""What hides a key; those that are finite hide none from a query that sees no other."""
FINITE = tuple(fill for fill in FILLS if math.isfinite(fill))


def program(seed: int) -> Program:
    """An attention under the masks of a seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = SIZES[seed % len(SIZES)]
    batch, queries, keys = sizes.batch, sizes.queries, sizes.keys
    lengths = torch.randint(0, keys + 1, (batch,), generator=generator)
    padding = torch.randint(0, 2, (batch, keys), generator=generator)
    positions = torch.randint(0, keys, (batch, queries), generator=generator)
    indexer = torch.randn(batch, queries, keys, generator=generator, dtype=torch.float64)

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, *made_of: Tensor) -> Tensor:
        draw = MaskChoices(Random(seed), sizes, *made_of)
        k_nope, v = sizes.up_projected(latent, w_kv).split([sizes.nope, sizes.value], -1)
        k = torch.cat([k_nope, sizes.to_heads(k_rope)], -1)
        return draw.one_of(ATTENTIONS, sizes.queries_of(x, w_q), k, v)

    return Program(function, (*sizes.tensors(generator), lengths, padding, positions, indexer))


def of_queries_and_keys(draw: MaskChoices, mask: Tensor) -> Tensor:
    """A mask with the dimensions of queries and keys at least; sometimes with all four."""
    s = draw.sizes
    if draw.happens(0.3):
        return mask.expand(s.batch, draw.choice([1, s.heads]), s.queries, s.keys)
    return mask if mask.dim() >= 2 else mask[None]


# Numbers to add to scores


def filled(draw: MaskChoices) -> Tensor:
    zeros = torch.zeros(draw.sizes.queries, draw.sizes.keys, dtype=torch.float64)
    return zeros.masked_fill(~draw.condition(), draw.choice(FILLS))


def multiplied(draw: MaskChoices) -> Tensor:
    return (1 - draw.condition().double()) * draw.choice(FINITE)


NUMBERS = (filled, multiplied)


# Steps from scores to scores


def fill(draw: MaskChoices, scores: Tensor) -> Tensor:
    return scores.masked_fill(~draw.condition(), draw.choice(FILLS))


def choose(draw: MaskChoices, scores: Tensor) -> Tensor:
    return torch.where(draw.condition(), scores, draw.choice(FILLS))


def add(draw: MaskChoices, scores: Tensor) -> Tensor:
    return scores + draw.one_of(NUMBERS)


def add_bias(draw: MaskChoices, scores: Tensor) -> Tensor:
    return scores + draw.indexer[:, None]


def double(draw: MaskChoices, scores: Tensor) -> Tensor:
    return draw.one_of(STEPS[:-1], scores) * 2


STEPS = (fill, choose, add, add, add_bias, double)


# Steps from attention weights to attention weights


def keep(draw: MaskChoices, weights: Tensor) -> Tensor:
    return weights


def without_nan(draw: MaskChoices, weights: Tensor) -> Tensor:
    return weights.nan_to_num()


def drop(draw: MaskChoices, weights: Tensor) -> Tensor:
    return weights.masked_fill(~draw.condition(), 0.0)


def drop_and_divide(draw: MaskChoices, weights: Tensor) -> Tensor:
    kept = weights * draw.condition()
    return kept / kept.sum(-1, keepdim=True)


AFTER = (keep, keep, keep, keep, without_nan, drop, drop_and_divide)


# Attentions


def sdpa(draw: MaskChoices, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sealed(q, k, v, of_queries_and_keys(draw, draw.condition()))


def sdpa_of_numbers(draw: MaskChoices, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = draw.one_of(NUMBERS)
    for _ in range(draw.below(2)):
        mask = mask + draw.one_of(NUMBERS)
    return sealed(q, k, v, of_queries_and_keys(draw, mask))


def by_hand(draw: MaskChoices, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    for _ in range(draw.choice([1, 2, 3])):
        scores = draw.one_of(STEPS, scores)
    weights = scores.softmax(-1) if draw.happens(0.7) else torch._safe_softmax(scores, -1)
    return draw.one_of(AFTER, weights) @ v


ATTENTIONS = (sdpa, sdpa_of_numbers, by_hand, by_hand, by_hand)
