"""Which pages hold the tokens of a batch of sequences of one length.

    token j of sequence b lies in page  pages[b, j // page_size],  row  j % page_size

Sequences of several lengths are several tables (of one sequence each, if need be) over one pool; `stack` makes one
block table and lengths of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CacheMismatchError, FreedError
from .pool import PagePool, stays


class BlockTable:
    """`batch` sequences of `length` tokens each, empty at first, of at most `max_pages` pages each (all of the pool's).

    `extend`, `write` and `read` are what a model's forward does; `extend` takes pages as they are needed. `fork` shares
    pages: a full one is never written again, and the last one, if it is not full, is copied before it is.
    """

    def __init__(self, pool: PagePool, batch: int, max_pages: int | None = None) -> None:
        self.pool, self.length = pool, 0
        self.page_tokens = pool.page_size
        """Tokens of a sequence in a page."""
        width = pool.pages if max_pages is None else max_pages
        pages = torch.zeros(batch, width, dtype=torch.int64, device=pool.device)
        stays(pages)
        self._pages: Tensor | None = pages
        self._shares_tail = False
        """Whether a page that the next token goes to may have another holder."""

    @property
    def pages(self) -> Tensor:
        """The block table `[batch, max_pages]`; what is behind a sequence's last page means nothing.

        Raises: FreedError, if the sequences were freed.
        """
        if self._pages is None:
            raise FreedError("expected sequences that are in the pool, found some that were freed")
        return self._pages

    @property
    def batch(self) -> int:
        return self.pages.shape[0]

    @property
    def max_pages(self) -> int:
        """The most pages that each sequence may have."""
        return self.pages.shape[1]

    @property
    def used(self) -> int:
        """Pages of each sequence."""
        return self._pages_for(self.length)

    def extend(self, count: int) -> None:
        """Make room for `count` more tokens of each sequence.

        Raises: OutOfPagesError or FreedError, with nothing changed; CacheMismatchError, if max_pages are too few.
        """
        page_size, before = self.page_tokens, self.used
        after = self._pages_for(self.length + count)
        taken = after - before  # by each sequence
        self.pool.require(self.batch * taken)
        if after > self.max_pages:
            raise CacheMismatchError(
                f"expected at most {self.max_pages} pages a sequence, found {after} for {self.length + count} tokens"
            )
        if self._shares_tail:
            self._copy_tail(self.batch * taken)
        column = torch.arange(self.length, self.length + count, device=self.pool.device) // page_size
        sequence = torch.arange(self.batch, device=self.pool.device)[:, None]
        new, place = (column >= before).expand(self.batch, -1), sequence * taken + column - before
        self.pages[:, column] = self.pool.take_where(new, place, self.pages[:, column], self.batch * taken)
        self.length += count

    def write(self, layer: int, tokens: Tensor) -> None:
        """Put `tokens` `[batch, S, L + R]` in the place of the last S tokens of one layer.

        Raises: FreedError; CacheMismatchError for another batch, width, dtype or device.
        """
        batch, count, _ = tokens.shape
        if batch != self.batch:
            raise CacheMismatchError(f"expected tokens of {self.batch} sequences, found {batch}")
        if count > self.length:
            raise CacheMismatchError(f"expected at most the {self.length} tokens that there is room for, found {count}")
        self.pool.write(layer, *self._places(self.length - count, count), tokens)

    def read(self, layer: int) -> Tensor:
        """All tokens of one layer, `[batch, length, L + R]`: a copy."""
        return self.pool.read(layer, *self._places(0, self.length))

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """`read` as latents `[batch, length, L]` and rope keys `[batch, length, R]`."""
        return self.pool.keys(layer, *self._places(0, self.length))

    def _places(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Page `[batch, count]` and row `[count]` of the tokens from `start` on."""
        position = torch.arange(start, start + count, device=self.pool.device)
        return self.pages[:, position // self.page_tokens], position % self.page_tokens

    def fork(self, rows: Tensor | None = None) -> BlockTable:
        """Sequences `rows` `[n]` (all) once more, as often as named, in the same pages until one of them grows.

        Raises: FreedError; IndexError for a row that there is none of.
        """
        chosen = self.pages if rows is None else self.pages[rows.to(self.pool.device)]
        other = self._empty(len(chosen))
        self.pool.share(chosen[:, : self.used])
        other.pages.copy_(chosen)
        other.length = self.length
        self._shares_tail = other._shares_tail = self.length % self.page_tokens != 0
        return other

    def select(self, rows: Tensor) -> BlockTable:
        """A table of sequences `rows` `[n]`, as often as named, in the place of this one, which is freed."""
        other = self.fork(rows)
        self.free()
        return other

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on; pages that hold none then are released.

        Raises: FreedError; CacheMismatchError for a length that is negative or larger than the present one.
        """
        if not 0 <= length <= self.length:
            raise CacheMismatchError(f"expected a length from 0 to {self.length}, found {length}")
        if length == self.length:
            return
        kept = self._pages_for(length)
        self.pool.release(self.pages[:, kept : self.used])
        self.length = length
        partial = length % self.page_tokens != 0
        self._shares_tail = partial and bool((self.pool.references[self.pages[:, kept - 1]] > 1).any())

    def free(self) -> None:
        """Release every page. The table cannot be used again.

        Raises: FreedError, if it was freed before.
        """
        self.pool.release(self.pages[:, : self.used])
        self._pages, self.length, self._shares_tail = None, 0, False

    def own(self) -> None:
        """Copy now, and not before the next write, what will be written and has other holders.

        Raises: OutOfPagesError or FreedError, with nothing changed.
        """
        if self._shares_tail:
            self._copy_tail(0)

    # torch has no types for `disable`.
    @torch.compiler.disable(reason="which pages have other holders is read on the host")  # type: ignore[untyped-decorator]
    def _copy_tail(self, further: int) -> None:
        """Give each sequence a last page of its own, if `further` pages are free besides."""
        tail = self.pages[:, self.used - 1].clone()
        shared = self._to_copy(tail)
        self.pool.require(len(shared) + further)
        self.pages[shared, self.used - 1] = self.pool.copy(tail[shared])
        self.pool.release(tail[shared])
        self._shares_tail = False

    def _to_copy(self, tail: Tensor) -> Tensor:
        """The sequences whose last page `tail` has other holders; of sequences that share one with each other only, the
        first keeps it."""
        rest = self.pool.references[tail].tolist()
        own = tail.tolist()
        left = dict(zip(own, rest, strict=True))
        copied = []
        for row in reversed(range(len(own))):
            if left[own[row]] > 1:
                left[own[row]] -= 1
                copied.append(row)
        return torch.tensor(copied[::-1], dtype=torch.int64, device=self.pool.device)

    def _pages_for(self, length: int) -> int:
        return (length + self.page_tokens - 1) // self.page_tokens

    def _empty(self, batch: int) -> BlockTable:
        """One like this, without tokens."""
        return BlockTable(self.pool, batch, self.max_pages)


def stack(tables: Sequence[BlockTable]) -> tuple[Tensor, Tensor]:
    """One block table `[B, n]` and lengths `[B]`, int64, of tables over one pool: sequences of unequal lengths.

    What is behind a sequence's last page is 0, a page that any reader may load and none may use.
    """
    if len({id(table.pool) for table in tables}) != 1:
        raise CacheMismatchError("expected tables over one pool, found several")
    most = max(table.used for table in tables)
    pages = [F.pad(table.pages[:, : table.used], (0, most - table.used)) for table in tables]
    lengths = [torch.full((table.batch,), table.length, device=table.pool.device) for table in tables]
    return torch.cat(pages), torch.cat(lengths)
