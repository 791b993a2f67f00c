"""Whether there are pages for more tokens: checked in eager code as it runs, and in compiled code by an op.

Dynamo gives up a function for good when it sees an exception in it: one cache without a free page would leave a model
uncompiled from then on. The op raises when the graph runs. It copies a small tensor from which everything that changes
is computed, so that nothing changes if it raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CacheMismatchError, OutOfPagesError


def check_free(count: int, available: int, pages: int, page_size: int) -> None:
    """Check that `count` of `pages` pages are free.

    Raises: OutOfPagesError if they are not.
    """
    if count > available:
        raise OutOfPagesError(
            f"expected {count} free pages, found {available} of {pages} ({page_size} tokens each): "
            "free a sequence or make the pool larger"
        )


def check_length(used: int, most: int, tokens: int) -> None:
    """Check that a sequence of `tokens` tokens, which takes `used` pages, has at most `most`.

    Raises: CacheMismatchError if it has more.
    """
    if used > most:
        raise CacheMismatchError(f"expected at most {most} pages per sequence, found {used} for {tokens} tokens")


def check_added(count: int) -> None:
    """Check that a number of tokens to be added is not negative.

    Raises: CacheMismatchError if it is.
    """
    if count < 0:
        raise CacheMismatchError(f"expected a number of tokens to add, found {count}")


def check_written(count: int, length: int) -> None:
    """Check that tokens to be written are at most as many as there are.

    Raises: CacheMismatchError if they are more.
    """
    if count > length:
        raise CacheMismatchError(f"expected at most the {length} tokens that there is room for, found {count}")


@torch.library.custom_op("mla_compile::if_there_are_pages", mutates_args=())
def if_there_are_pages(
    places: Tensor,
    count: int,
    available: int,
    pages: int,
    page_size: int,
    used: int = 0,
    most: int = 0,
    tokens: int = 0,
) -> Tensor:
    """A copy of `places`, which are those of pages among the free ones, after both checks; by default, of free pages
    alone.

    Raises: OutOfPagesError, CacheMismatchError.
    """
    check_free(count, available, pages, page_size)
    check_length(used, most, tokens)
    return places.clone()


@if_there_are_pages.register_fake
def _if_there_are_pages_fake(places: Tensor, *_: int) -> Tensor:
    return torch.empty_like(places)
