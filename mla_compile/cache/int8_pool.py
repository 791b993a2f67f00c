"""A pool whose latents are in INT8: 644 bytes a token and layer of DeepSeek, 1,152 in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..int8 import INT8, quantised
from .coded_pool import CodedPagePool


class INT8PagePool(CodedPagePool):
    """A `PagePool` whose latents are `[pages, page_size, L]` in int8, each token's under a float32 scale of its own.

    `layers`, `scales` `[pages, page_size, 1]` and `ropes` are as `CodedPagePool` says.

    Args: as `PagePool`, dtype that of the tokens.
    Raises: CacheMismatchError (a ValueError) for a size below its least.
    """

    coded: ClassVar[torch.dtype] = INT8

    def groups(self) -> int:
        """1: the whole latent has one scale."""
        return 1

    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """As `mla_compile.int8` says."""
        return quantised(latent)
