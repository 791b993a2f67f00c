"""Store cached tokens in FP8 (e4m3fn): the 656-byte layout of DeepSeek's caches, generalised to any sizes.

    latent   L bytes        e4m3fn, to be multiplied by the scale of its group of columns
    scales   4 G bytes      float32, one per group of 128 columns, or one for all if L is no multiple of 128
    rope key R elements     in the model's dtype

In packed rows (`RowLayout`) scales begin at a multiple of 4 bytes, the rope key at a multiple of its element size too,
and the row is a multiple of 16 bytes. With L = 512 and R = 64 in bfloat16: 512 + 16 + 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .scales import scaled_down

GROUP = 128
"""The number of latent columns that share a scale."""
FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
"""The largest e4m3fn number, 448, to which the greatest magnitude of a group is scaled."""


def groups_of(latent_width: int) -> int:
    """`G`, the number of scales of a token."""
    return latent_width // GROUP if latent_width % GROUP == 0 else 1


def quantised(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise latents: `[..., L]` in e4m3fn and scales `[..., G]`, each the greatest magnitude of a group over 448."""
    numbers, scales = scaled_down(latent, groups_of(latent.shape[-1]), MOST)
    return numbers.to(FP8), scales


def quantised_by(tokens: Tensor, scale: Tensor) -> Tensor:
    """Quantise tokens by one scale for all of them, as e4m3fn numbers clamped to magnitudes of at most 448."""
    return (tokens.float() / scale).clamp(-MOST, MOST).to(FP8)


@dataclass(frozen=True)
class RowLayout:
    """The layout of a row with a latent of width L, its scales, and a rope key of width R in `dtype`."""

    latent_width: int
    rope_width: int
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """`G`, the number of scales of a token."""
        return groups_of(self.latent_width)

    @property
    def _scales(self) -> int:
        return self.latent_width + -self.latent_width % 4

    @property
    def _rope(self) -> int:
        end = self._scales + 4 * self.groups
        return end + -end % self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a token: 656 for DeepSeek in bfloat16."""
        used = self._rope + self.rope_width * self.dtype.itemsize
        return used + -used % 16

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View bytes `[..., row_bytes]` as latents `[..., L]` in e4m3fn, scales `[..., G]`, rope keys `[..., R]`."""
        return (
            _part(rows, 0, self.latent_width, FP8),
            _part(rows, self._scales, self.groups, torch.float32),
            _part(rows, self._rope, self.rope_width, self.dtype),
        )


def _part(rows: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from byte `start` on. Whole rows are viewed as `dtype` first, as Inductor would copy a part of a
    row to view it."""
    first = start // dtype.itemsize
    return rows.view(dtype)[..., first : first + count]
