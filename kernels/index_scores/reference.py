"""The equation of an indexer's scores: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from .arguments import IndexScores


def score(x: IndexScores) -> Tensor:
    """`[B, Sq, T]`."""
    products = torch.einsum("bshd,btd->bsht", x.q.to(x.weights.dtype), x.k.to(x.weights.dtype))
    return torch.einsum("bsh,bsht->bst", x.weights, products.relu())


index_scores_reference = unchecked(IndexScores, score)
