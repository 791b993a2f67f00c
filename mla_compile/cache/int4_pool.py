"""A pool of INT4 latents: 448 bytes per token and layer for DeepSeek, against 1,152 in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from ..int4 import PACKED, groups_of, quantised, unpacked
from .coded_pool import CodedPagePool


class INT4PagePool(CodedPagePool):
    """A `PagePool` whose latents are `[pages, page_size, L / 2]` in uint8, two integers of 4 bits in each byte.

    There is a float32 scale for each token and group of 32 columns (see `mla_compile.int4`). `layers`, `scales`
    `[pages, page_size, G]` and `ropes` are as described for `CodedPagePool`.

    Args: as for `PagePool`, where dtype is that of the tokens.
    Raises: CacheMismatchError (a ValueError), as `PagePool`, and for an odd width of latents.
    """

    coded: ClassVar[torch.dtype] = PACKED

    @property
    def code_width(self) -> int:
        """`L / 2`."""
        if self.latent_width % 2:
            raise CacheMismatchError(f"expected latents of an even width for INT4, found {self.latent_width}")
        return self.latent_width // 2

    def groups(self) -> int:
        """One per group of 32 columns (see `groups_of`)."""
        return groups_of(self.latent_width)

    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise latents by `mla_compile.int4`."""
        return quantised(latent)

    def _numbers(self, layer: int, place: tuple[Tensor, ...]) -> Tensor:
        return unpacked(super()._numbers(layer, place))
