"""Joining with torch's own `cat`, in new memory: what `dispatcher/grow_cache.h` does not take, and other devices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..dispatcher import general
from .arguments import GrowCache


def join(x: GrowCache) -> Tensor:
    """past, then new, along dim, contiguous."""
    return torch.cat([x.past, x.new], x.dim).contiguous()


grow_cache_aten = checked(GrowCache, join)
implement("grow_cache", "CompositeExplicitAutograd", grow_cache_aten)
general("grow_cache")(grow_cache_aten)
