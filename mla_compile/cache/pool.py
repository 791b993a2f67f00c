"""A pool of pages for latents and rope keys that counts the holders of each page.

A page number stands for one page in every layer. A page may have several holders (sequences with a common prefix) and
is free again when the last one releases it. All is plain torch. The methods that run in a model's forward
(`take_where`, `write`, `read`) read no tensor values on the host, so that they compile without a graph break.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMismatchError, FreedError, PageIndexError
from .checks import check_free, if_there_are_pages
from .inference_mode import to_be_written


def check_count(name: str, count: Any) -> None:
    """Check that `count` is an integer of at least 1.

    Raises: CacheMismatchError if it is not.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise CacheMismatchError(f"expected {name} to be a whole number, found {count!r}")
    if count < 1:
        raise CacheMismatchError(f"expected {name} to be at least 1, found {count}")


def stays(*tensors: Tensor) -> None:
    """Mark the addresses of tensors as static, so that CUDA graphs may write to them; does nothing in compiled code."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


def _check_room(pages: int, elements: int, device: torch.device) -> None:
    """Check that `pages` of `elements` each, at one byte per element, could fit into a device's memory.

    Without the check, a system that overcommits memory may grant it, and kill the process when it uses the memory.
    """
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if pages * (elements + 16) > memory:  # each page also has two int64 numbers
        found = f"{pages} of at least {elements} bytes"
        raise CacheMismatchError(
            f"expected pages that fit into the {memory / 2**30:.1f} GiB of {device}, found {found}"
        )


class PagePool:
    """A page pool: for each layer a tensor `[pages, page_size, L + R]`, a token's latent followed by its rope key.

    Args: layers; latent_width L; rope_width R (may be 0); pages and page_size, at least 1; dtype and device.
    Raises: CacheMismatchError (a ValueError) for a size below its minimum, or pages that exceed the device's memory.
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
        """The dtype of tokens that are written and read."""
        with to_be_written():
            self.layers = self._empty(layers, pages, latent_width + rope_width, dtype, device)
            self.references = torch.zeros(pages, dtype=torch.int64, device=device)
            """The number of holders of each page, `[pages]`."""
            self._free = torch.arange(pages, device=device)
        self._available = pages
        """The number of free pages: the first ones in `_free`, of which the last is taken first."""
        self._left: list[tuple[Tensor, int]] = []
        """Block tables that were left to the pool, and the columns of each that hold pages."""
        self._traced = 0
        """How many times Dynamo had traced a function when garbage was last collected."""
        stays(*self.tensors, self.references, self._free)

    def _empty(
        self, layers: int, pages: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> list[Tensor]:
        """Pages for each layer. They are zero because a naive reader multiplies masked values by zero weights."""
        return [torch.zeros(pages, self.page_size, width, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that hold tokens, each `[pages, page_size, ...]`."""
        return self.layers

    @property
    def pages(self) -> int:
        """The number of pages in the pool."""
        return self.references.shape[0]

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def available(self) -> int:
        """The number of free pages."""
        self.collect()
        return self._available

    def leave(self, pages: Tensor, used: int) -> None:
        """Leave the first `used` columns of a block table `[batch, n]` to the pool, which releases them later.

        Nothing is computed, so this may be called at any moment, as garbage collection does.
        """
        self._left.append((pages, used))

    def collect(self) -> None:
        """Release what was left to the pool; does nothing in compiled code.

        Where Dynamo has traced anything since the last time, garbage is collected first: it leaves the objects that it
        traced, tables among them, in reference cycles.
        """
        if torch.compiler.is_compiling():
            return
        traced = sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
        if traced != self._traced and self._available < self.pages:
            self._traced = traced
            gc.collect()
        while self._left:
            pages, used = self._left.pop()
            self.release(pages[:, :used])

    def require(self, count: int) -> None:
        """Raise OutOfPagesError unless `count` pages are free."""
        check_free(count, self.available, self.pages, self.page_size)

    def take(self, count: int) -> Tensor:
        """Take `count` free pages, `[count]`, each of which then has one holder.

        Raises: OutOfPagesError, with nothing taken.
        """
        if torch.compiler.is_compiling():
            place = torch.arange(count, device=self.device)
            place = if_there_are_pages(place, count, self._available, self.pages, self.page_size)
            taken = self._free[self._available - count + place]
        else:
            self.require(count)
            taken = self._free[self._available - count : self._available].clone()
        self._available -= count
        self.references[taken] = 1
        return taken

    def take_where(self, new: Tensor, place: Tensor, pages: Tensor, count: int) -> Tensor:
        """Take `count` pages; return `pages` with the `place`-th of these wherever `new` is True.

        The same page may appear several times. `place` is at least -1, and from 0 to count - 1 where `new` is True. No
        size depends on the number of new pages. In compiled code the caller has checked that so many are free (see
        `checks.py`).

        Raises: OutOfPagesError, with nothing taken.
        """
        if not torch.compiler.is_compiling():
            self.require(count)
        pages = torch.where(new, self._free[self._available - 1 - place], pages)
        self.references[pages] = torch.where(new, 1, self.references[pages])
        self._available -= count
        return pages

    def share(self, pages: Tensor) -> None:
        """Add a holder to each of `pages`, once for each time that it is named.

        Raises: PageIndexError or FreedError, with nothing changed.
        """
        pages = self._held(pages)
        self.references += torch.bincount(pages, minlength=self.pages)

    def release(self, pages: Tensor) -> None:
        """Remove a holder from each of `pages`, once for each time that it is named; pages without holders become free.

        Raises: PageIndexError or FreedError, with nothing changed.
        """
        pages = self._held(pages)
        count = torch.bincount(pages, minlength=self.pages)
        if bool((count > self.references).any()):
            page = int((count > self.references).nonzero()[0])
            raise FreedError(
                f"expected page {page} to be released at most as often as it is held, found one release more"
            )
        self.references -= count
        freed = ((count > 0) & (self.references == 0)).nonzero()[:, 0]
        self._free[self._available : self._available + len(freed)] = freed
        self._available += len(freed)

    def copy(self, pages: Tensor) -> Tensor:
        """Take new pages, and copy the contents of `pages` to them in every layer."""
        taken = self.take(len(pages))
        self.overwrite(taken, pages)
        return taken

    def overwrite(self, targets: Tensor, pages: Tensor) -> None:
        """Copy the contents of `pages` to pages `targets` in every layer."""
        for tensor in self.tensors:
            rows = tensor.view(torch.uint8)  # not every device can index FP8, but all can index bytes
            rows[targets] = rows[pages]

    def clear(self, pages: Tensor) -> None:
        """Set all of `pages` to zero in every layer; does nothing in compiled code, where masks hide NaN too."""
        for tensor in () if torch.compiler.is_compiling() else self.tensors:
            tensor.view(torch.uint8)[pages] = 0

    def write(self, layer: int, pages: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Write `tokens` `[..., L + R]` to rows `rows` of pages `pages`, both `[...]`, of one layer, in place.

        Their values are written, not how they were computed: no gradient goes through a pool.

        Raises: CacheMismatchError for another width, dtype or device; PageIndexError or FreedError for pages that do
        not exist or have no holder (not checked on a GPU and in compiled code), with nothing written.
        """
        if values_at_hand(pages):
            self._held(pages)
        width = self.latent_width + self.rope_width
        if tokens.shape[-1] != width:
            raise CacheMismatchError(f"expected tokens {width} wide, found {tokens.shape[-1]}")
        self.check(tokens)
        self._put(layer, (pages, rows), tokens.detach() if tokens.requires_grad else tokens)

    def _put(self, layer: int, place: tuple[Tensor, ...], tokens: Tensor) -> None:
        self.layers[layer][place] = tokens

    def check(self, tokens: Tensor) -> None:
        """Raise CacheMismatchError unless tokens are of the pool's dtype and on its device."""
        if tokens.dtype != self.dtype:
            raise CacheMismatchError(f"expected tokens of the pool's dtype {self.dtype}, found {tokens.dtype}")
        if tokens.device != self.device:
            raise CacheMismatchError(f"expected tokens on the pool's device {self.device}, found {tokens.device}")

    def read(self, layer: int, pages: Tensor, rows: Tensor) -> Tensor:
        """Read the tokens `[..., L + R]` in rows `rows` of pages `pages`, both `[...]`, of one layer.

        Raises: PageIndexError for a page that does not exist (not checked on a GPU and in compiled code).
        """
        return torch.cat(self.keys(layer, pages, rows), dim=-1)

    def keys(self, layer: int, pages: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Like `read`, but latents `[..., L]` and rope keys `[..., R]`; without rows, all rows `[..., page_size]`."""
        if values_at_hand(pages):
            self._in_pool(pages)
        return self._get(layer, (pages,) if rows is None else (pages, rows))

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.layers[layer][place].split([self.latent_width, self.rope_width], dim=-1)
        return latent, k_rope

    def _in_pool(self, pages: Tensor) -> Tensor:
        """Flatten `pages`, and check that they exist in the pool."""
        pages = pages.flatten()
        outside = (pages < 0) | (pages >= self.pages)
        if bool(outside.any()):
            raise PageIndexError(f"expected pages from 0 to {self.pages - 1}, found {int(pages[outside][0])}")
        return pages

    def _held(self, pages: Tensor) -> Tensor:
        """Flatten `pages`, and check that they exist in the pool and have holders."""
        pages = self._in_pool(pages)
        free = self.references[pages] == 0
        if bool(free.any()):
            raise FreedError(f"expected pages that are held, found page {int(pages[free][0])}, which is free")
        return pages


def values_at_hand(tensor: Tensor) -> bool:
    """Whether values can be read without waiting for a device and without a graph break."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"
