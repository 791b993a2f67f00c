"""An indexer's scores in C++ (`native.cpp`), without the products of single heads: the implementation for CPU tensors.

float64, and a machine without a compiler, are left to `aten.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..latent_attention.cached import OF_PRODUCTS
from ..native import TYPES, Kernels
from .arguments import IndexScores
from .aten import score_in_blocks

KERNELS = Kernels(
    (*OF_PRODUCTS, Path(__file__).with_name("native.cpp")),
    ("const void*",) * 3 + ("void*",) + ("int64_t",) * 8,
)


def score_on_cpu(x: IndexScores) -> Tensor:
    """`[B, Sq, T]`."""
    kernel = KERNELS.of(x.q.dtype) if x.q.dtype in TYPES and min(*x.q.shape, x.k.shape[1]) > 0 else None
    if kernel is None:
        return score_in_blocks(x)
    q, weights = x.q.contiguous(), x.weights.contiguous()
    k = x.k if x.k.stride(2) == 1 else x.k.contiguous()
    out = weights.new_empty((*q.shape[:2], k.shape[1]))
    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[1], q.shape[3]
    kernel(q, k, weights, out, *sizes, *k.stride()[:2], torch.get_num_threads())
    return out


index_scores_cpu = checked(IndexScores, score_on_cpu)
implement("index_scores", "CPU", index_scores_cpu)
