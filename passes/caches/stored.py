"""How a site's keys are stored: what attention reads of them, and in which form an op takes them."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..algebra.terms import Dim, Read
from ..code.reading import Reader
from ..mla.site import Site


class StoredKeys(Protocol):
    """The keys of a site, where and as they are stored. All that differs between two of a kind is in fields."""

    otherwise: ClassVar[str]
    """For a report, what a path does that cannot read them where they are; empty where there is nothing to say."""
    in_pages: ClassVar[bool]
    """Whether ops find them by a table of pages."""
    may_be_cast: ClassVar[bool]
    """Whether they may be cast to the dtype of the queries: not those of a pool, which are many more than a site's."""

    @property
    def words(self) -> str:
        """How attention reads them, for a report; empty where there is nothing to say."""

    @property
    def latent(self) -> Read:
        """Over `layout` and the site's rank."""

    @property
    def ropes(self) -> tuple[Read, ...]:
        """Over `layout` and the columns of each of the site's rope keys."""

    @property
    def layout(self) -> tuple[Dim, Dim]:
        """What takes the place of batch and keys."""

    @property
    def coded(self) -> torch.dtype | None:
        """The dtype of the tensors of coded numbers, which ops widen and multiply with scales; None where nothing is
        coded."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """All that attention reads for them."""

    def read_latent(self, read: Reader, site: Site) -> Tensor:
        """The latents as ops take them: `layout` and L, in `coded`."""

    def read_scales(self, read: Reader, latent: Tensor) -> Tensor | None:
        """The scales of what is coded, as ops take them: float32, of size 1 where they are shared; None without any."""

    def read_table(self, read: Reader, site: Site, latent: Tensor, *, whole: bool) -> Tensor | None:
        """`[B, max_pages]`, or with no more entries than the keys need if not `whole`; None if not in pages."""
