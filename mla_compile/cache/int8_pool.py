"""A pool of INT8 latents: 644 bytes per token and layer for DeepSeek, against 1,152 in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..int8 import INT8, quantised
from .coded_pool import CodedPagePool


class INT8PagePool(CodedPagePool):
    """A `PagePool` whose latents are `[pages, page_size, L]` in int8, with a float32 scale for each token.

    `layers`, `scales` `[pages, page_size, 1]` and `ropes` are as described for `CodedPagePool`.

    Args: as for `PagePool`, where dtype is that of the tokens.
    Raises: CacheMismatchError (a ValueError), as `PagePool`.
    """

    coded: ClassVar[torch.dtype] = INT8

    def groups(self) -> int:
        """1, as the whole latent has one scale."""
        return 1

    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise latents by `mla_compile.int8`."""
        return quantised(latent)
