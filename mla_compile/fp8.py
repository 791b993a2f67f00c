"""How a cached token lies in memory in FP8 (e4m3fn): the 656 bytes of DeepSeek's caches, for any sizes.

    latent   L bytes        e4m3fn, to be multiplied with the scale of their group of columns
    scales   4 G bytes      float32, one a group of 128 columns, or of all where 128 does not divide L
    rope key R elements     of the model's dtype

each part from a multiple of 4 bytes on, the row a multiple of 16. With L = 512, R = 64 in bfloat16: 512 + 16 + 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128
"""Latent columns that share a scale."""
FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
"""The greatest number of e4m3fn, 448: what the greatest of a group becomes."""
LEAST = 2.0**-100
"""A group of smaller numbers is taken for one of these, so that no scale is 0."""


@dataclass(frozen=True)
class RowLayout:
    """A row of latent_width L and rope_width R, its rope key in `dtype`."""

    latent_width: int
    rope_width: int
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """`G`, scales of a token."""
        return self.latent_width // GROUP if self.latent_width % GROUP == 0 else 1

    @property
    def _scales(self) -> int:
        return self.latent_width + -self.latent_width % 4

    @property
    def _rope(self) -> int:
        return self._scales + 4 * self.groups

    @property
    def row_bytes(self) -> int:
        """Bytes of a token: 656 for DeepSeek in bfloat16."""
        used = self._rope + self.rope_width * self.dtype.itemsize
        return used + -used % 16

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents `[..., L]` in e4m3fn, scales `[..., G]` and rope keys `[..., R]` in bytes `[..., row_bytes]`."""
        rope_end = self._rope + self.rope_width * self.dtype.itemsize
        return (
            rows[..., : self.latent_width].view(FP8),
            rows[..., self._scales : self._rope].view(torch.float32),
            rows[..., self._rope : rope_end].view(self.dtype),
        )
