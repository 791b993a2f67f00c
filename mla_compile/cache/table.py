"""The block table of a batch of sequences of equal length: which pages hold their tokens.

    token j of sequence b is in page  pages[b, j // page_size],  row  j % page_size

Sequences of different lengths need several tables (if necessary, of one sequence each) over one pool. `stack` combines
these into one block table with lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CacheMismatchError, FreedError
from .checks import check_added, check_free, check_length, check_written, if_there_are_pages
from .inference_mode import is_locked, to_be_written
from .pool import PagePool, stays


class BlockTable:
    """`batch` sequences of `length` tokens each, empty at first, of at most `max_pages` pages each (default: as many as
    the pool has).

    A model's forward calls `extend`, which takes pages as they are needed, `write` and `read`. `fork` shares pages: a
    full page is never written again, and a last page that is not full is copied before it is written.

    Its pages are its own: a table that is dropped without `free` leaves them to the pool.
    """

    def __init__(self, pool: PagePool, batch: int, max_pages: int | None = None) -> None:
        self.pool, self._length = pool, 0
        self.page_tokens = pool.page_size
        """The number of tokens of a sequence in a page."""
        width = pool.pages if max_pages is None else max_pages
        with to_be_written():
            pages = torch.zeros(batch, width, dtype=torch.int64, device=pool.device)
        stays(pages)
        self._pages: Tensor | None = pages
        self._shares_tail = False
        """Whether a page to which the next token goes may have another holder."""
        self._forked = 0
        """The number of tokens that forks may share."""

    def __del__(self) -> None:
        pages = getattr(self, "_pages", None)  # there is none if __init__ raised, or Dynamo made the object
        if pages is not None:
            self.pool.leave(pages, self.used)

    def __copy__(self) -> BlockTable:
        """A fork: each table gives back the pages that it holds."""
        return self.fork()

    @property
    def pages(self) -> Tensor:
        """The block table `[batch, max_pages]`; entries behind a sequence's last page are undefined.

        Raises: FreedError if the sequences were freed.
        """
        if self._pages is None:
            raise FreedError("expected sequences that are in the pool, found some that were freed")
        if is_locked(self._pages):
            self._pages = self._pages.clone()
        return self._pages

    @property
    def length(self) -> int:
        """The number of tokens of each sequence."""
        return self._length

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence `[batch]`, int64, on the pool's device."""
        return torch.full((self.batch,), self._length, device=self.pool.device)

    @property
    def batch(self) -> int:
        return self.pages.shape[0]

    @property
    def max_pages(self) -> int:
        """The largest number of pages that a sequence may have."""
        return self.pages.shape[1]

    @property
    def used(self) -> int:
        """The number of pages of each sequence."""
        return self._pages_for(self.length)

    def extend(self, count: int) -> None:
        """Make room for `count` more tokens of each sequence.

        Raises: OutOfPagesError or FreedError, with nothing changed; CacheMismatchError if that exceeds max_pages, or
        for a negative number.
        """
        page_size, before = self.page_tokens, self.used
        after = self._pages_for(self.length + count)
        taken = after - before  # by each sequence
        free = self.batch * taken, self.pool.available, self.pool.pages, self.pool.page_size
        length = after, self.max_pages, self.length + count
        if not torch.compiler.is_compiling():
            check_added(count)
            check_free(*free)
            check_length(*length)
        if self._shares_tail:
            self._copy_tail(self.batch * taken)
        column = quotient(torch.arange(self.length, self.length + count, device=self.pool.device), page_size)
        sequence = torch.arange(self.batch, device=self.pool.device)[:, None]
        new, place = (column >= before).expand(self.batch, -1), sequence * taken + column - before
        if torch.compiler.is_compiling():
            place = if_there_are_pages(place, *free, *length)
        self.pages[:, column] = self.pool.take_where(new, place, self.pages[:, column], self.batch * taken)
        self._length += count

    def write(self, layer: int, tokens: Tensor) -> None:
        """Write `tokens` `[batch, S, L + R]` to the places of the last S tokens of one layer.

        Raises: FreedError; CacheMismatchError for another batch, width, dtype or device, for more than `length` tokens,
        or for tokens that a fork shares (not checked in compiled code).
        """
        batch, count, _ = tokens.shape
        if batch != self.batch:
            raise CacheMismatchError(f"expected tokens of {self.batch} sequences, found {batch}")
        check_written(count, self.length)
        if not torch.compiler.is_compiling() and self.length - count < self._forked:
            raise CacheMismatchError(
                f"expected tokens behind the {self._forked} that a fork shares, found {count} tokens"
            )
        self.pool.write(layer, *self._places(self.length - count, count), tokens)

    def read(self, layer: int) -> Tensor:
        """A copy of all tokens of one layer, `[batch, length, L + R]`."""
        return torch.cat(self.keys(layer), dim=-1)[:, : self.length]

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """The latents `[batch, length, L]` and rope keys `[batch, length, R]` of one layer."""
        return self.pool.keys(layer, *self._places(0, self.length))

    def _places(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """The pages `[batch, count]` and rows `[count]` of `count` tokens from `start` on."""
        position = torch.arange(start, start + count, device=self.pool.device)
        return self.pages[:, quotient(position, self.page_tokens)], position % self.page_tokens

    def fork(self, rows: Tensor | None = None) -> BlockTable:
        """A table that continues sequences `rows` `[n]` (default: all), each as often as named, and shares their pages
        until one of them grows.

        Raises: FreedError; IndexError for a row that does not exist.
        """
        chosen = self.pages if rows is None else self.pages[rows.to(self.pool.device)]
        other = self._empty(len(chosen))
        self.pool.share(chosen[:, : self.used])
        other.pages.copy_(chosen)
        other._length = self.length
        self._shares_tail = other._shares_tail = self.length % self.page_tokens != 0
        self._forked = other._forked = self.length
        return other

    def select(self, rows: Tensor) -> BlockTable:
        """A table of sequences `rows` `[n]`, each as often as named, that replaces this one, which is freed."""
        other = self.fork(rows)
        self.free()
        return other

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on, and release the pages that then hold none.

        Raises: FreedError; CacheMismatchError for a length that is negative or larger than the present one.
        """
        self.check_length(length)
        if length == self.length:
            return
        kept = self._pages_for(length)
        self.pool.release(self.pages[:, kept : self.used])
        self._length, self._forked = length, min(self._forked, length)
        partial = length % self.page_tokens != 0
        self._shares_tail = partial and bool((self.pool.references[self.pages[:, kept - 1]] > 1).any())

    def check_length(self, length: int) -> None:
        """Raise CacheMismatchError for a length that is negative or larger than the present one."""
        if not 0 <= length <= self.length:
            raise CacheMismatchError(f"expected a length from 0 to {self.length}, found {length}")

    def require(self, count: int) -> None:
        """Raise OutOfPagesError unless there are pages for `count` more tokens of each sequence, which own the last."""
        self.own()
        self.pool.require(self.batch * (self._pages_for(self.length + count) - self.used))

    def free(self) -> None:
        """Release all pages. The table cannot be used again.

        Raises: FreedError if it was freed before.
        """
        self.pool.release(self.pages[:, : self.used])
        self._pages, self._length, self._shares_tail = None, 0, False

    def own(self) -> None:
        """Copy pages that will be written and have other holders now, rather than at the next write.

        Raises: OutOfPagesError or FreedError, with nothing changed.
        """
        if self._shares_tail:
            self._copy_tail(0)

    # torch has no type stubs for `disable`.
    @torch.compiler.disable(reason="which pages have other holders is read on the host")  # type: ignore[untyped-decorator]
    def _copy_tail(self, further: int) -> None:
        """Give each sequence its own last page. Raises OutOfPagesError unless `further` pages are free in addition."""
        tail = self.pages[:, self.used - 1].clone()
        shared = self._to_copy(tail)
        self.pool.require(len(shared) + further)
        self.pages[shared, self.used - 1] = self.pool.copy(tail[shared])
        self.pool.release(tail[shared])
        self._shares_tail = False

    def _to_copy(self, pages: Tensor) -> Tensor:
        """The places in `pages` `[n]`, pages of this table, whose pages have to be copied to have one holder each. The
        first of several places that are all holders of a page keeps it."""
        rest = self.pool.references[pages].tolist()
        own = pages.tolist()
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
        """An empty table like this one."""
        return BlockTable(self.pool, batch, self.max_pages)


def stack(tables: Sequence[BlockTable]) -> tuple[Tensor, Tensor]:
    """Combine tables over one pool into one block table `[B, n]` and lengths `[B]`, int64, which may differ.

    Entries behind the pages that a sequence holds are 0, a page that readers may load but do not use. Keep the tables
    as long as the result is in use: a table that is dropped gives its pages back.

    Raises: FreedError; CacheMismatchError for tables over several pools, or of tokens that are split over ranks.
    """
    if len({id(table.pool) for table in tables}) != 1:
        raise CacheMismatchError("expected tables over one pool, found tables over several")
    for table in tables:
        if table.page_tokens != table.pool.page_size:
            raise CacheMismatchError(
                f"expected tables whose pages hold all of their {table.page_tokens} tokens, found tokens that are "
                f"split over ranks, of which this one holds {table.pool.page_size}"
            )
    most = max(table.used for table in tables)
    pages = [F.pad(table.pages[:, : table.used], (0, most - table.used)) for table in tables]
    return torch.cat(pages), torch.cat([table.lengths for table in tables])


def quotient(position: Tensor, page_tokens: int) -> Tensor:
    """`position // page_tokens` of positions from 0 on, truncated: code that stock Inductor generates for a CPU may
    leave out the last of those that are rounded down (see `inductor/loop_splits.py`)."""
    if torch.compiler.is_compiling():  # Inductor fails to bound the quotient of two sizes that may both be infinite
        torch._check(page_tokens < 2**31)
    return torch.div(position, page_tokens, rounding_mode="trunc")
