"""The masks of all keys, as one rank needs them that has a part of the keys (see `caches/ranks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import product, same, symbols_in
from ..algebra.substitution import merge
from ..algebra.terms import Axis, Dim, Read
from ..code.reading import Reader
from ..mla.site import Site
from ..trace.trace import Trace
from .bounds import Bounds
from .dense import Dense
from .meaning import Meaning, understand


def over_one_axis(site: Site, trace: Trace) -> tuple[Site, Meaning] | None:
    """A site whose keys are one axis to its masks, though several to its latent, and what the masks then mean.

    None if a mask tells the axes of the keys apart.
    """
    keys = site.attention.keys
    whole = Axis(product(axis.size for axis in keys))
    masks = [
        replace(mask, term=replace(mask.term, read=merge(mask.term.read, keys, whole), parts=None))
        for mask in site.attention.masks
    ]
    if any(not mask.term.axes.isdisjoint(keys) for mask in masks):
        return None
    one = replace(site, attention=replace(site.attention, keys=(whole,), masks=tuple(masks)))
    return one, understand(one, trace)


@dataclass(frozen=True)
class OfRank:
    """What the masks of all keys say about those of one rank.

    `keys` are the axes of all keys, and `ranks` is the one that counts ranks. The axes may count further than the
    keys of `site`: then there are no keys at the last indices.
    """

    told: Bounds | Dense
    keys: Dim
    ranks: Axis
    rank: int
    site: Site = field(compare=False, repr=False)
    """The site, whose keys are one axis."""

    @property
    def reads(self) -> Sequence[Read]:
        """The reads that the masks are made of."""
        return self.told.reads

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are not sizes of a tensor."""
        return self.told.symbols | symbols_in(self.site.sizes["Sq"], *(axis.size for axis in self.keys))

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key of any rank, as far as can be told."""
        return self.told.may_be_empty

    def mask(self, read: Reader) -> tuple[Tensor | None, None]:
        """A mask over this rank's keys; no causal offset, which would not count these keys."""
        assert isinstance(self.told, Dense)
        mask, offset = self.told.mask(read)
        positions = self._positions(read)
        mask = self._at(read, mask, positions)
        if offset is not None:
            mask = _limited(mask, self._seen(read, positions, offset))
        if self._cut:
            keys: Any = read.realize(self.site.sizes["T"])
            mask = _limited(mask, (positions < keys)[None, None, None])
        return mask, None

    def in_pages(self, read: Reader, like: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """A mask for what lengths do not say; no causal limit; and how many of this rank's keys each sequence has."""
        mask, causal, lengths, first = self.told.in_pages(read, like)
        count: Any = read.realize(self.site.sizes["Sq"])
        positions = self._positions(read)
        mask = self._at(read, mask, positions)
        if causal:
            starts = lengths - count if first is None else first
            mask = _limited(mask, self._seen(read, positions, starts[:, None, None, None]))
        return mask, False, self._own(read, lengths), None

    @property
    def _cut(self) -> bool:
        """Whether the axes may count further than the keys."""
        return not same(product(axis.size for axis in self.keys), self.site.sizes["T"])

    def _at(self, read: Reader, mask: Tensor | None, positions: Tensor) -> Tensor | None:
        """A mask of all keys, at the keys of this rank; positions beyond the last key get that key's value."""
        if mask is None or mask.shape[3] == 1:
            return mask
        last: Any = read.realize(self.site.sizes["T"])
        return mask.index_select(3, positions.clamp_max(last - 1) if self._cut else positions)

    def _positions(self, read: Reader) -> Tensor:
        """The positions of this rank's keys among all keys, `[T / k]`."""
        device = self.site.node.meta["val"].device
        positions = torch.zeros((), dtype=torch.int64, device=device)
        for i, axis in enumerate(self.keys):
            stride: Any = read.realize(product(faster.size for faster in self.keys[i + 1 :]))
            size: Any = read.realize(axis.size)
            if axis is self.ranks:
                positions = positions + self.rank * stride
            else:
                positions = positions[..., None] + torch.arange(size, device=device) * stride
        return positions.flatten()

    def _seen(self, read: Reader, positions: Tensor, first: Any) -> Tensor:
        """Bool `[1 or B, 1, Sq, T / k]`: the keys up to a query's own position."""
        count: Any = read.realize(self.site.sizes["Sq"])
        return positions <= torch.arange(count, device=positions.device)[None, None, :, None] + first

    def _own(self, read: Reader, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` keys this rank has. The ranks take turns, each with a run of keys."""
        place = self.keys.index(self.ranks)
        run: Any = read.realize(product(axis.size for axis in self.keys[place + 1 :]))
        ranks: Any = read.realize(self.ranks.size)
        turn = run * ranks
        return lengths // turn * run + (lengths % turn - self.rank * run).clamp(0, run)


def _limited(mask: Tensor | None, seen: Tensor) -> Tensor:
    """A mask that also hides what is not `seen`."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
