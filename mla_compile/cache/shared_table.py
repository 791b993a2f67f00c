"""The table of sequences of which each rank of a mesh has some tokens: it is the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .shares import Shares
from .table import BlockTable

if TYPE_CHECKING:
    from .pool import PagePool


class SharedTable(BlockTable):
    """A `BlockTable` of which a page holds this rank's share of `ranks * page_size` tokens."""

    def __init__(self, pool: PagePool, batch: int, max_pages: int | None, shares: Shares) -> None:
        super().__init__(pool, batch, shares.spare if max_pages is None else max_pages)
        self.shares, self.page_tokens = shares, shares.page_tokens
        # A last column for the tokens of other ranks. (Of a page that is chosen instead, Inductor knows no bounds.)
        self._pages = F.pad(self.pages, (0, 1), value=shares.spare)

    @property
    def max_pages(self) -> int:
        return self.pages.shape[1] - 1

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
        column = torch.where(own, position, self.max_pages * self.page_tokens) // self.page_tokens
        return self.pages[:, column], row

    def _empty(self, batch: int) -> BlockTable:
        return SharedTable(self.pool, batch, self.max_pages, self.shares)
