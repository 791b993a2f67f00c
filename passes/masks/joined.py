"""Masks of keys that are concatenated parts, where each part has a mask of its own, and at least one names keys.

    key < T1        a window, say, of the latest tokens      all of its keys are named, or those of the window
    key >= T1       indices, T1 added to each                those that an indexer chose of what is compressed

A query sees what each part lets it see: together, the parts name its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size, known_at_most, symbols_in, total
from ..algebra.terms import Axis, Read
from ..attention.summands import Mask
from ..code.reading import Reader
from ..mla.site import Site
from .causal import Causal
from .kind import Filled, Kind, not_hidden, query_of
from .limit import Limit
from .naming import Every, Naming, Window
from .pairs import Pairs
from .positions import Affine
from .tensor import TensorMask, tensor_mask


@dataclass(frozen=True)
class PartOfKeys:
    """Keys from `start` on, one for each index of `key`: those that `naming` names and none of `kinds` hides."""

    key: Axis
    start: Size
    naming: Naming
    kinds: tuple[Kind, ...]
    site: Site = field(compare=False, repr=False)
    """The site with these keys alone."""

    def indices(self, read: Reader) -> Tensor:
        """Indices `[B, Sq, count]` among the keys of all parts, -1 for none."""
        indices = not_hidden(self.naming.indices(self.site, read), self.kinds, self.site, read)
        start: Any = read.realize(self.start)  # int or SymInt
        return torch.where(indices < 0, -1, indices + start)


@dataclass(frozen=True)
class OfParts(Naming):
    """The keys that any of the parts names."""

    parts: tuple[PartOfKeys, ...]

    @property
    def count(self) -> Size:
        return total(part.naming.count for part in self.parts)

    @property
    def reads(self) -> tuple[Read, ...]:
        of_kinds = (read for part in self.parts for kind in part.kinds for read in kind.reads)
        return (*of_kinds, *(read for part in self.parts for read in part.naming.reads))

    @property
    def symbols(self) -> set[sympy.Symbol]:
        found = set[sympy.Symbol]()
        for part in self.parts:
            own = symbols_in(part.start, part.key.size)
            found = found.union(own, part.naming.symbols, *(kind.symbols for kind in part.kinds))
        return found

    def indices(self, site: Site, read: Reader) -> Tensor:
        return torch.cat([part.indices(read).long() for part in self.parts], dim=-1)


@dataclass(frozen=True)
class JoinedMask(Kind):
    """A mask of the graph that is such a join, and its tensor for ops that do not take named keys."""

    parts: tuple[PartOfKeys, ...]
    mask: TensorMask
    words: tuple[str, ...] = field(default=("tensor",), compare=False)

    @property
    def reads(self) -> tuple[Read, ...]:
        return self.mask.reads

    @property
    def origin(self) -> tuple[Kind, ...]:
        return (self.mask,)

    @property
    def names(self) -> OfParts:
        return OfParts(self.parts)

    def tensor(self, pairs: Pairs) -> Tensor | Filled:
        return self.mask.tensor(pairs)


def part_of(site: Site, key: Axis) -> Site:
    """The site with only the keys that `key` counts."""
    return replace(site, attention=replace(site.attention, keys=(key,)))


def joined(mask: Mask, segments: Sequence[tuple[Site, Sequence[Kind]]]) -> JoinedMask | None:
    """A mask of the concatenated keys of sites, each with its kinds; None if none names keys, or one is not pair by
    pair."""
    parts: list[PartOfKeys] = []
    start: Size = 0
    for site, kinds in segments:
        (key,) = site.attention.keys
        naming = next((kind for kind in kinds if kind.names is not None), None)
        hiding = tuple(kind for kind in kinds if kind is not naming)
        if not all(kind.pair_by_pair for kind in hiding):
            return None
        names = naming.names if naming is not None else None
        parts.append(PartOfKeys(key, start, names or _nearest(kinds, site), hiding, site))
        start = total([start, key.size])
    if not any(kind.names is not None for _, kinds in segments for kind in kinds):
        return None
    words = dict.fromkeys(word for _, kinds in segments for kind in kinds for word in kind.words)
    return JoinedMask(tuple(parts), tensor_mask(mask), tuple(words))


def _nearest(kinds: Sequence[Kind], site: Site) -> Naming:
    """The keys between two limits that move with the query. All keys, if there is no first limit, if none is left out,
    or if there may be none between the limits."""
    (key,), query = site.attention.keys, query_of(site)
    here = Affine(0, () if query is None else ((query, 1),)) - Affine(0, ((key, 1),))
    behind = [kind.what - here for kind in kinds if isinstance(kind, Limit)]
    firsts = [first.const for first in behind if not first.terms]
    lasts = [kind.offset for kind in kinds if isinstance(kind, Causal)]
    if not firsts:
        return Every(key.size)
    first = firsts[0]
    length = total([lasts[0], -1 * first, 1]) if lasts else total([key.size, -1 * first])
    some_left_out = known_at_most(0, length) and not known_at_most(key.size, length)
    return Window(first, length) if some_left_out else Every(key.size)
