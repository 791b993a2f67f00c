"""Pools by the dtype in which they store latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from ..fp8 import FP8
from ..int4 import INT4
from ..int8 import INT8
from .fp8_pool import FP8PagePool
from .int4_pool import INT4PagePool
from .int8_pool import INT8PagePool
from .pool import PagePool

POOLS: dict[torch.dtype, type[PagePool]] = {FP8: FP8PagePool, INT8: INT8PagePool, INT4: INT4PagePool}
"""The pools that store latents in fewer bits than a model computes in."""


def pool_in(dtype: torch.dtype | None, scale: float | Tensor | None, like: Tensor, **sizes: Any) -> PagePool:
    """A pool for tokens like a tensor, in its dtype (None) or in fewer bits; `scale` as for an `FP8PagePool`.

    Raises: CacheMismatchError for any other dtype or scale, and as the pools do.
    """
    if dtype not in (None, like.dtype, *POOLS) or (scale is not None and dtype != FP8):
        found = dtype if scale is None else f"{dtype} with a scale"
        expected = f"a cache in the model's {like.dtype}, in {FP8}, {INT8} or {INT4}"
        raise CacheMismatchError(f"expected {expected}, found {found}")
    if dtype == FP8:
        return FP8PagePool(**sizes, dtype=like.dtype, device=like.device, scale=scale)
    kind = PagePool if dtype is None else POOLS.get(dtype, PagePool)
    return kind(**sizes, dtype=like.dtype, device=like.device)
