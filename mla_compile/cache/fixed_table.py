"""The block table of sequences that have all their pages from the start, and whose length is a number on the device.

A compiled step is the same graph for any length: it takes no pages, reads all pages, and leaves it to the mask to hide
what is behind the last token, as with a static cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from .checks import check_added, check_written
from .inference_mode import is_locked, to_be_written
from .pool import stays, values_at_hand
from .table import BlockTable

if TYPE_CHECKING:
    from .pool import PagePool


class FixedTable(BlockTable):
    """A `BlockTable` that takes `max_pages` pages for each sequence at construction, and clears them.

    The page of the next token and those behind it never have another holder, so that writes need no check.

    Raises: OutOfPagesError.
    """

    def __init__(self, pool: PagePool, batch: int, max_pages: int, pages: Tensor | None = None) -> None:
        if pages is None:
            pages = pool.take(batch * max_pages).view(batch, max_pages)
            pool.clear(pages)
        super().__init__(pool, batch, max_pages)
        with to_be_written():
            self.tokens = torch.zeros((), dtype=torch.int64, device=pool.device)
        """The number of tokens of each sequence, in a tensor with a static address."""
        stays(self.tokens)
        self.pages.copy_(pages)

    @property
    def length(self) -> int:
        """The number of tokens of each sequence, read from the device."""
        return int(self.tokens)

    @property
    def lengths(self) -> Tensor:
        return self.tokens.expand(self.batch)

    @property
    def room(self) -> int:
        """The number of tokens for which each sequence has pages."""
        return self.max_pages * self.page_tokens

    @property
    def used(self) -> int:
        return 0 if self._pages is None else self._pages.shape[1]

    def extend(self, count: int) -> None:
        """Add `count` to the length of each sequence.

        Raises: FreedError; CacheMismatchError if there is no room (not checked on a GPU and in compiled code), or for a
        negative number.
        """
        if values_at_hand(self.pages):
            check_added(count)
            if self.length + count > self.room:
                left = self.room - self.length
                raise CacheMismatchError(f"expected room for {count} more tokens, found room for {left}")
        self._unlock()
        self.tokens.add_(count)

    def write(self, layer: int, tokens: Tensor) -> None:
        batch, count, _ = tokens.shape
        if batch != self.batch:
            raise CacheMismatchError(f"expected tokens of {self.batch} sequences, found {batch}")
        if values_at_hand(self.pages):
            check_written(count, self.length)
        position = self.tokens - count + torch.arange(count, device=self.pool.device)
        self.pool.write(layer, self.pages[:, position // self.page_tokens], position % self.page_tokens, tokens)

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """Latents `[batch, room, L]` and rope keys `[batch, room, R]`; behind the last token are zeros, or tokens that
        were forgotten."""
        latent, k_rope = self.pool.keys(layer, self.pages)
        return latent.flatten(1, 2), k_rope.flatten(1, 2)

    def fork(self, rows: Tensor | None = None) -> FixedTable:
        chosen = self.pages if rows is None else self.pages[rows.to(self.pool.device)]
        whole = self.length // self.page_tokens
        own = self.pool.take(len(chosen) * (self.max_pages - whole)).view(len(chosen), -1)
        self.pool.clear(own)
        self.pool.share(chosen[:, :whole])
        other = FixedTable(self.pool, len(chosen), self.max_pages, torch.cat([chosen[:, :whole], own], dim=1))
        other.tokens.copy_(self.tokens)
        other._copy_begun(chosen[:, whole:])
        return other

    def select(self, rows: Tensor) -> FixedTable:
        """As for a `BlockTable`, but in place if there are as many rows as sequences.

        Where each row is kept at most once, no page is taken.
        """
        if len(rows) != self.batch:
            kept = torch.arange(self.batch)[rows.cpu()].tolist()
            other = self._keep(kept) if len(set(kept)) == len(kept) else self.fork(rows)
            self.free()
            return other
        chosen, whole = self.pages[rows.to(self.pool.device)], self.length // self.page_tokens
        self.pool.share(chosen[:, :whole])
        self.pool.release(self.pages[:, :whole])
        self.pages[:, :whole] = chosen[:, :whole]
        self._copy_begun(chosen[:, whole:])
        return self

    def _keep(self, rows: list[int]) -> FixedTable:
        """A table of some of the sequences, with all of their pages; this one is left with the others."""
        places = torch.tensor(rows, dtype=torch.int64, device=self.pool.device)
        other = FixedTable(self.pool, len(rows), self.max_pages, self.pages[places])
        other.tokens.copy_(self.tokens)
        others = torch.ones(self.batch, dtype=torch.bool, device=self.pool.device)
        others[places] = False
        self._pages = self.pages[others]
        return other

    def crop(self, length: int) -> None:
        self.check_length(length)
        behind = self.pages[:, length // self.page_tokens :]
        numbers = behind.flatten().clone()
        shared = self._to_copy(numbers)
        taken = self.pool.copy(numbers[shared])
        self.pool.release(numbers[shared])
        numbers[shared] = taken
        behind.copy_(numbers.view_as(behind))
        self._unlock()
        self.tokens.fill_(length)

    def free(self) -> None:
        self.pool.release(self.pages)
        self._pages, self.tokens = None, torch.zeros_like(self.tokens)

    def own(self) -> None:
        """Do nothing: pages that will be written have no other holder."""

    def _unlock(self) -> None:
        if is_locked(self.tokens):
            self.tokens = self.tokens.clone()

    def _copy_begun(self, pages: Tensor) -> None:
        """Copy a page that is not full, the first of `pages` `[batch, n]`, to this table's page in its place."""
        length = self.length
        if length % self.page_tokens:
            self.pool.overwrite(self.pages[:, length // self.page_tokens], pages[:, 0])
