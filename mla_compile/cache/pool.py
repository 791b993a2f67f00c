"""A pool of pages for latents and rope keys, and who holds which page.

One page number stands for one page in every layer. A page may have several holders (sequences with a common beginning);
it is free again when the last one releases it. Plain torch: what runs in a model's forward (`take`, `write`, `read`)
reads no tensor's values on the host, so that it compiles without a break.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMismatchError, FreedError, OutOfPagesError, PageIndexError


def check_count(name: str, count: Any) -> None:
    """Check that a count is one.

    Raises: CacheMismatchError, if it is no whole number or less than 1.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise CacheMismatchError(f"expected {name} to be a whole number, found {count!r}")
    if count < 1:
        raise CacheMismatchError(f"expected {name} to be at least 1, found {count}")


def stays(*tensors: Tensor) -> None:
    """Say of tensors that they stay where they are, so that CUDA graphs may write to them; nothing in compiled code."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


def _check_room(pages: int, elements: int, device: torch.device) -> None:
    """Check that so many pages of so many elements may fit into a device's memory, each element in a byte.

    A system may promise memory that it has not, and end the process that uses it.
    """
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if pages * (elements + 16) > memory:  # two numbers in int64 for each page besides
        found = f"{pages} of at least {elements} bytes"
        raise CacheMismatchError(
            f"expected pages that fit into the {memory / 2**30:.1f} GiB of {device}, found {found}"
        )


class PagePool:
    """`layers` tensors `[pages, page_size, L + R]`: a token's latent, then its rope key.

    Args: layers; latent_width L; rope_width R (may be 0); pages and page_size, at least 1; dtype and device.
    Raises: CacheMismatchError (a ValueError) for a size below its least.
    """

    def __init__(
        self,
        layers: int,
        latent_width: int,
        rope_width: int,
        pages: int,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"layers": layers, "latent_width": latent_width, "pages": pages, "page_size": page_size}
        for name, size in sizes.items():
            check_count(name, size)
        if rope_width < 0:
            raise CacheMismatchError(f"expected rope_width to be at least 0, found {rope_width}")
        _check_room(pages, layers * page_size * (latent_width + rope_width), torch.empty(0, device=device).device)
        self.latent_width, self.rope_width, self.page_size = latent_width, rope_width, page_size
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        """Of the tokens that come and go."""
        self.layers = self._empty(layers, pages, latent_width + rope_width, dtype, device)
        self.references = torch.zeros(pages, dtype=torch.int64, device=device)
        """How many holders each page has, `[pages]`."""
        self._free = torch.arange(pages, device=device)
        self.available = pages
        """How many pages are free: those that `_free` names before this place, the last one to be taken first."""
        stays(*self.tensors, self.references, self._free)

    def _empty(
        self, layers: int, pages: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> list[Tensor]:
        """Pages for each layer. Zeros, as a naive reader multiplies what it masked by weights of zero."""
        return [torch.zeros(pages, self.page_size, width, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def tensors(self) -> list[Tensor]:
        """All that holds tokens, each `[pages, page_size, ...]`."""
        return self.layers

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self.references.shape[0]

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def require(self, count: int) -> None:
        """Raises OutOfPagesError unless `count` pages are free."""
        if count > self.available:
            raise OutOfPagesError(
                f"expected {count} free pages, found {self.available} of {self.pages} "
                f"({self.page_size} tokens each): free a sequence or make the pool larger"
            )

    def take(self, count: int) -> Tensor:
        """`count` free pages, `[count]`, each of which now has one holder.

        Raises: OutOfPagesError, with nothing taken.
        """
        self.require(count)
        taken = self._free[self.available - count : self.available].clone()
        self.available -= count
        self.references[taken] = 1
        return taken

    def take_where(self, new: Tensor, place: Tensor, pages: Tensor, count: int) -> Tensor:
        """`pages`, and where `new` is True the page that is `place`-th to be taken, for `count` new ones in all.

        The same page may be new more than once. `place` is at least -1, and 0 to count - 1 where `new`. No size depends
        on how many are new.

        Raises: OutOfPagesError, with nothing taken.
        """
        self.require(count)
        pages = torch.where(new, self._free[self.available - 1 - place], pages)
        self.references[pages] = torch.where(new, 1, self.references[pages])
        self.available -= count
        return pages

    def share(self, pages: Tensor) -> None:
        """One more holder for each of `pages`, as often as it is named.

        Raises: PageIndexError or FreedError, with nothing changed.
        """
        pages = self._held(pages)
        self.references += torch.bincount(pages, minlength=self.pages)

    def release(self, pages: Tensor) -> None:
        """One holder less for each of `pages`, as often as it is named; pages without one are free.

        Raises: PageIndexError or FreedError, with nothing changed.
        """
        pages = self._held(pages)
        count = torch.bincount(pages, minlength=self.pages)
        if bool((count > self.references).any()):
            page = int((count > self.references).nonzero()[0])
            raise FreedError(f"expected page {page} to be released as often as it is held, found once more")
        self.references -= count
        freed = ((count > 0) & (self.references == 0)).nonzero()[:, 0]
        self._free[self.available : self.available + len(freed)] = freed
        self.available += len(freed)

    def copy(self, pages: Tensor) -> Tensor:
        """New pages with the contents of `pages`, in every layer."""
        taken = self.take(len(pages))
        self.overwrite(taken, pages)
        return taken

    def overwrite(self, targets: Tensor, pages: Tensor) -> None:
        """Give pages `targets` the contents that `pages` have, in every layer."""
        for tensor in self.tensors:
            rows = tensor.view(torch.uint8)  # not every device indexes FP8: bytes do
            rows[targets] = rows[pages]

    def write(self, layer: int, pages: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Put `tokens` `[..., L + R]` into rows `rows` of pages `pages`, both `[...]`, of one layer, in place.

        Raises: CacheMismatchError for another width, dtype or device; PageIndexError or FreedError for pages that are
        not there or not held (not checked on a GPU and in compiled code), with nothing written.
        """
        if values_at_hand(pages):
            self._held(pages)
        width = self.latent_width + self.rope_width
        if tokens.shape[-1] != width:
            raise CacheMismatchError(f"expected tokens {width} wide, found {tokens.shape[-1]}")
        self.check(tokens)
        self._put(layer, (pages, rows), tokens)

    def _put(self, layer: int, place: tuple[Tensor, ...], tokens: Tensor) -> None:
        self.layers[layer][place] = tokens

    def check(self, tokens: Tensor) -> None:
        """Raises CacheMismatchError unless tokens are of the pool's dtype and on its device."""
        if tokens.dtype != self.dtype:
            raise CacheMismatchError(f"expected tokens of the pool's dtype {self.dtype}, found {tokens.dtype}")
        if tokens.device != self.device:
            raise CacheMismatchError(f"expected tokens on the pool's device {self.device}, found {tokens.device}")

    def read(self, layer: int, pages: Tensor, rows: Tensor) -> Tensor:
        """The tokens `[..., L + R]` in rows `rows` of pages `pages`, both `[...]`, of one layer.

        Raises: PageIndexError for a page that is not there (not checked on a GPU and in compiled code).
        """
        return torch.cat(self.keys(layer, pages, rows), dim=-1)

    def keys(self, layer: int, pages: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`read` as latents `[..., L]` and rope keys `[..., R]`; without rows, all `[..., page_size]` of the pages."""
        if values_at_hand(pages):
            self._in_pool(pages)
        return self._get(layer, (pages,) if rows is None else (pages, rows))

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.layers[layer][place].split([self.latent_width, self.rope_width], dim=-1)
        return latent, k_rope

    def _in_pool(self, pages: Tensor) -> Tensor:
        """`pages` as one dimension, each of which the pool has."""
        pages = pages.flatten()
        outside = (pages < 0) | (pages >= self.pages)
        if bool(outside.any()):
            raise PageIndexError(f"expected pages from 0 to {self.pages - 1}, found {int(pages[outside][0])}")
        return pages

    def _held(self, pages: Tensor) -> Tensor:
        """`pages` as one dimension, each of which the pool has and somebody holds."""
        pages = self._in_pool(pages)
        free = self.references[pages] == 0
        if bool(free.any()):
            raise FreedError(f"expected pages that are held, found page {int(pages[free][0])}, which is free")
        return pages


def values_at_hand(tensor: Tensor) -> bool:
    """Whether looking at values costs no wait for a device and no break of a graph."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"
