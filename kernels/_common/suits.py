"""Whether the Triton kernels take a problem. Does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_ROWS = 256
"""More rows than any tile of keys has: offsets within a tile are 32 bits wide."""


def suits(q: Tensor, *caches: Tensor) -> bool:
    """Whether q is in half precision or float32, and the rows of each cache are dense and not absurdly far apart."""
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and all(
        (cache.shape[-1] < 2 or cache.stride(-1) == 1) and abs(cache.stride(-2)) * _TILE_ROWS < 2**31
        for cache in caches
    )


def small(mask: Tensor | None) -> bool:
    """Whether the elements of a tile of a mask `[B, N, Sq, T]` are not absurdly far apart."""
    if mask is None:
        return True
    strides = [abs(stride) for size, stride in zip(mask.shape[2:], mask.stride()[2:], strict=True) if size != 1]
    return sum(strides) * _TILE_ROWS < 2**31
