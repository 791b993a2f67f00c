"""Scales of keys in few bits, as ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra.terms import Dim, Read
from ..code.reading import Reader


def read_scales(
    read: Reader, latent: Tensor, scales: Read | None, factor: float, layout: tuple[Dim, Dim], groups: Dim
) -> Tensor:
    """`[first of layout | 1, second | 1, groups | 1]`, float32: scales times a factor, or the factor alone.

    A dimension of `layout` along which scales are shared has size 1.
    """
    if scales is None:
        return latent.new_full((1, 1, 1), factor, dtype=torch.float32)
    tensor: Tensor = read(scales, *layout, groups, broadcast=False).float()
    return tensor if factor == 1.0 else tensor * factor
