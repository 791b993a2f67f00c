"""The block table of sequences whose tokens are split over the ranks of a mesh. It is the same on all ranks."""

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
    """A `BlockTable` whose pages each hold this rank's share of `ranks * page_size` tokens."""

    def __init__(self, pool: PagePool, batch: int, max_pages: int | None, shares: Shares) -> None:
        super().__init__(pool, batch, shares.spare if max_pages is None else max_pages)
        self.shares, self.page_tokens = shares, shares.page_tokens
        # The last column holds the spare page, to which tokens of other ranks go. (If the page were selected by a
        # `where` instead, Inductor would not know its bounds.)
        self._pages = F.pad(self.pages, (0, 1), value=shares.spare)

    @property
    def max_pages(self) -> int:
        return self.pages.shape[1] - 1

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """All ranks' latents `[batch, T, L]` and rope keys `[batch, T, R]` of one layer, for all tokens that the pages
        have room for. In compiled code, values behind the last token are undefined; else they are zeros."""
        own = self.pool.keys(layer, self.pages[:, : self.used])
        latent, k_rope = (self.shares.gathered(tensor.flatten(1, 2)) for tensor in own)
        if not torch.compiler.is_compiling():
            behind = torch.arange(latent.shape[1], device=latent.device)[:, None] >= self.length
            latent, k_rope = (keys.masked_fill(behind, 0) for keys in (latent, k_rope))
        return latent, k_rope

    def _places(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """The page and row of each token; for tokens of other ranks, those of the spare page."""
        position = torch.arange(start, start + count, device=self.pool.device)
        own, row = self.shares.places(position)
        column = torch.where(own, position, self.max_pages * self.page_tokens) // self.page_tokens
        return self.pages[:, column], row

    def _empty(self, batch: int) -> BlockTable:
        return SharedTable(self.pool, batch, self.max_pages, self.shares)
