"""Gradients of one group of heads by products and a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scores import softmax_with_lse
from ..visibility import KeyPositions
from .rows import Rows

_SCORES = 1 << 22
"""Scores of a group of heads computed at a time: 16 MiB in float32."""


def by_products(rows: Rows, k: Tensor, v: Tensor, d_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from products and a softmax over the scores of some queries and all keys at a time.

    Adds to d_mask `[1, H or 1, Sq or 1, T or 1]`.
    """
    dq, dk, dv = torch.empty_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
    count = rows.q.shape[1]
    step = max(_SCORES // (k.shape[0] * k.shape[1]), 1)
    for start in range(0, count, step):
        queries = range(start, min(start + step, count))
        part = slice(queries.start, queries.stop)
        q, do = rows.q[:, part], rows.do[:, part]
        bias = rows.visibility.bias(queries, rows.keys, q.dtype)
        weights = softmax_with_lse(rows.scale * (q @ k.mT)[None], bias, None)[0][0]
        grown = do @ v.mT
        mean = (weights * grown).sum(-1, keepdim=True)
        if rows.d_lse is not None:
            mean = mean - rows.d_lse[:, part, None]
        d_scores = weights * (grown - mean)
        dq[:, part] = rows.scale * (d_scores @ k)
        dk += rows.scale * (d_scores.mT @ q)
        dv += weights.mT @ do
        if d_mask is not None:
            _add_to_mask(d_scores, queries, rows.keys, d_mask)
    return dq, dk, dv


def _add_to_mask(d_scores: Tensor, queries: range, keys: KeyPositions, d_mask: Tensor) -> None:
    """Add d_scores `[H, s, C]` to d_mask `[1, H or 1, Sq or 1, T or 1]`, summed over the dims that it broadcasts."""
    if d_mask.shape[2] != 1:
        d_mask = d_mask.narrow(2, queries.start, len(queries))
    summed = [dim for dim, size in enumerate(d_mask.shape[1:]) if size == 1]
    total = d_scores.sum(summed, keepdim=True)[None] if summed else d_scores[None]
    if d_mask.shape[3] == 1:
        d_mask += total
    elif isinstance(keys, range):
        d_mask.narrow(3, keys.start, len(keys)).add_(total)
    else:
        d_mask.index_add_(3, keys, total)
