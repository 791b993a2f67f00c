"""Keys in tensors of all keys, in the dtype in which attention takes them: as the user's code has them.

Where lengths say how many keys a sequence has, such a cache may be treated as pages, one for each sequence: ops over
pages take lengths and touch no key beyond them. Keys of packed sequences may be treated as pages of one token each, a
sequence being a run of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algebra.terms import Dim, Read
from ..code.reading import Reader
from ..mla.site import Site


@dataclass(frozen=True)
class DenseKeys:
    """The latent and the rope keys of a site over its batch and keys."""

    words: ClassVar[str] = ""
    otherwise: ClassVar[str] = ""
    in_pages: ClassVar[bool] = False
    may_be_cast: ClassVar[bool] = True
    coded: ClassVar[torch.dtype | None] = None

    latent: Read
    ropes: tuple[Read, ...]
    layout: tuple[Dim, Dim]

    @property
    def reads(self) -> tuple[Read, ...]:
        """What attention reads for its keys."""
        return (self.latent, *self.ropes)

    def read_latent(self, read: Reader, site: Site) -> Tensor:
        """Over `layout` and the site's rank."""
        tensor: Tensor = read(self.latent, *self.layout, site.rank)
        return tensor

    def read_scales(self, read: Reader, latent: Tensor) -> Tensor | None:
        """None: there are no scales."""
        return None

    def read_table(self, read: Reader, site: Site, latent: Tensor, *, whole: bool) -> Tensor | None:
        """None: there are no pages."""
        return None


@dataclass(frozen=True)
class DenseKeysUpToLengths(DenseKeys):
    """Dense keys where each sequence is a page of its own."""

    words: ClassVar[str] = "reads the cache up to lengths, a page a sequence"
    in_pages: ClassVar[bool] = True

    def read_table(self, read: Reader, site: Site, latent: Tensor, *, whole: bool) -> Tensor | None:
        """`[B, 1]`: sequence i has page i."""
        return torch.arange(latent.shape[0], device=latent.device).unsqueeze(1)


@dataclass(frozen=True)
class DenseKeysInSequences(DenseKeys):
    """The keys of all sequences one behind the other, each key a page; what attends to them makes the tables."""

    words: ClassVar[str] = "reads each sequence's own keys"
    in_pages: ClassVar[bool] = True


def keys_in_sequences(site: Site) -> DenseKeysInSequences:
    """The keys of a site of packed sequences."""
    ropes = tuple(rope.key.read for rope in site.ropes)
    return DenseKeysInSequences(site.latent.read, ropes, (site.attention.keys, ()))


def dense_keys(site: Site, *, up_to_lengths: bool = False) -> DenseKeys:
    """The keys of a site as its code has them."""
    layout = DenseKeysUpToLengths if up_to_lengths else DenseKeys
    return layout(site.latent.read, tuple(rope.key.read for rope in site.ropes), (site.batch, site.attention.keys))
