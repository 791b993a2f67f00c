"""How a cached token is kept in FP8 (e4m3fn): the 656 bytes of DeepSeek's caches, for any sizes.

    latent   L bytes        e4m3fn, to be multiplied with the scale of their group of columns
    scales   4 G bytes      float32, one a group of 128 columns, or of all where 128 does not divide L
    rope key R elements     of the model's dtype

In packed rows (`RowLayout`) each part begins at a multiple of 4 bytes and of its elements' size, and the row is a
multiple of 16. With L = 512, R = 64 in bfloat16: 512 + 16 + 128.
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


def groups_of(latent_width: int) -> int:
    """`G`, scales of a token."""
    return latent_width // GROUP if latent_width % GROUP == 0 else 1


def quantised(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Latents `[..., L]` in e4m3fn and their scales `[..., G]`, the greatest magnitude of a group over 448."""
    grouped = latent.float().unflatten(-1, (groups_of(latent.shape[-1]), -1))
    scales = grouped.abs().amax(-1).clamp_min(LEAST) / MOST
    return (grouped / scales[..., None]).flatten(-2).to(FP8), scales


def quantised_by(tokens: Tensor, scale: Tensor) -> Tensor:
    """Tokens over a scale for all of them, as numbers of e4m3fn; what is greater than 448 becomes that."""
    return (tokens.float() / scale).clamp(-MOST, MOST).to(FP8)


@dataclass(frozen=True)
class RowLayout:
    """A row of latent_width L and rope_width R, its rope key in `dtype`."""

    latent_width: int
    rope_width: int
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """`G`, scales of a token."""
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
        """Latents `[..., L]` in e4m3fn, scales `[..., G]` and rope keys `[..., R]` in bytes `[..., row_bytes]`."""
        return (
            _part(rows, 0, self.latent_width, FP8),
            _part(rows, self._scales, self.groups, torch.float32),
            _part(rows, self._rope, self.rope_width, self.dtype),
        )


def _part(rows: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from a byte on. First whole rows as that dtype: Inductor copies parts of them to view them so."""
    first = start // dtype.itemsize
    return rows.view(dtype)[..., first : first + count]
