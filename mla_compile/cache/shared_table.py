"""The table of sequences of which each rank of a mesh has some tokens: it is the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .shares import Shares
from .table import BlockTable

if TYPE_CHECKING:
    from .pool import PagePool


class SharedTable(BlockTable):
    """A `BlockTable` of which a page holds this rank's share of `ranks * page_size` tokens."""

    def __init__(self, pool: PagePool, batch: int, max_pages: int | None, shares: Shares) -> None:
        super().__init__(pool, batch, max_pages)
        self.shares, self.page_tokens = shares, shares.page_tokens

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """All ranks' latents `[batch, T, L]` and rope keys `[batch, T, R]` of one layer, of all tokens that their pages
        have room for: what is behind the last token means nothing."""
        own = self.pool.keys(layer, self.pages[:, : self.used])
        latent, k_rope = (self.shares.gathered(tensor.flatten(1, 2)) for tensor in own)
        return latent, k_rope

    def read(self, layer: int) -> Tensor:
        return torch.cat(self.keys(layer), dim=-1)[:, : self.length]

    def _places(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Page and row, those of the spare page for tokens of other ranks."""
        position = torch.arange(start, start + count, device=self.pool.device)
        own, row = self.shares.places(position)
        return torch.where(own, self.pages[:, position // self.page_tokens], self.shares.spare), row

    def _empty(self, batch: int) -> BlockTable:
        return SharedTable(self.pool, batch, self.pages.shape[1], self.shares)
