"""An indexer's scores out of ATen operations, some queries at a time: on any device, for any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from .arguments import IndexScores
from .reference import score

_MOST_BYTES = 64 << 20
"""What the products of all heads with some queries may take."""


def score_in_blocks(x: IndexScores) -> Tensor:
    """`[B, Sq, T]`."""
    batch, queries, heads, _ = x.q.shape
    keys = x.k.shape[1]
    some = max(_MOST_BYTES // max(batch * heads * keys * x.weights.element_size(), 1), 1)
    if queries <= some:
        return score(x)
    blocks = zip(x.q.split(some, 1), x.weights.split(some, 1), strict=True)
    k = x.k.to(x.weights.dtype)
    return torch.cat([score(IndexScores(q.to(k.dtype), k, weights)) for q, weights in blocks], 1)


index_scores_aten = checked(IndexScores, score_in_blocks)
implement("index_scores", "CompositeExplicitAutograd", index_scores_aten)
