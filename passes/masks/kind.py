"""What a kind of mask is: one thing that hides keys from queries, and what is known about it.

A kind has to say what it reads and what its tensor is. By default, nothing else is known: ops get the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size
from ..algebra.terms import Axis, Read
from ..code.reading import Reader
from ..mla.site import Site
from .naming import Naming
from .pairs import NamedPairs, Pairs
from .positions import Affine


@dataclass(frozen=True)
class Bound:
    """Keys before the least of `lengths`, and up to a query's own index plus the least of `positions`.

    All are made of constants and of tensor elements that depend on the sequence alone.
    """

    lengths: tuple[Affine, ...] = ()
    positions: tuple[Affine, ...] = ()


class Filled(NamedTuple):
    """A bool tensor, and the number that replaces the scores that it hides, whatever replaces other hidden scores."""

    attends: Tensor
    fill: float


class Kind(ABC):
    """One thing that hides keys from the queries of a site.

    Kinds are frozen dataclasses. All fields that their code depends on take part in comparisons.
    """

    @property
    @abstractmethod
    def reads(self) -> Sequence[Read]:
        """The reads that all it says is made of."""

    @abstractmethod
    def tensor(self, pairs: Pairs) -> Tensor | Filled:
        """The mask at all pairs of a query and a key, `[B|1, N|1, Sq|1, T|1]`.

        Bool, True where the query attends to the key, or a floating number to add to the score.
        """

    @property
    def words(self) -> tuple[str, ...]:
        """What a report calls it, in one or more words."""
        return ("tensor",)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols that its code needs and that no size of what it reads determines."""
        return set()

    @property
    def origin(self) -> tuple[Kind, ...]:
        """Masks of the graph that say this together, perhaps with more that also holds. Empty: it stands for itself."""
        return ()

    @property
    def at_hand(self) -> bool:
        """Whether its tensor is in the graph already, so that its origin would be no cheaper."""
        return False

    @property
    def pair_by_pair(self) -> bool:
        """Whether its tensor is plain bool, and can be had at any pairs of a query and a key."""
        return False

    @property
    def causal_offset(self) -> Size | None:
        """The offset, if all that it says is that query i attends to keys j <= i + causal_offset; else None."""
        return None

    def bound(self, site: Site) -> Bound | None:
        """The bound, if all that it says is how many first keys a query sees; else None."""
        return None

    @property
    def names(self) -> Naming | None:
        """What names every query's keys, if that is all that it says; else None."""
        return None

    def implies(self, other: Kind) -> bool:
        """Whether it provably hides all that another kind hides."""
        return False


def query_of(site: Site) -> Axis | None:
    """The axis of a site's queries; None if there is one query."""
    return site.tokens[0] if site.tokens else None


def without_causal(kinds: Sequence[Kind]) -> tuple[Size | None, tuple[Kind, ...]]:
    """The offset of a causal limit, which every op is told separately, and the other kinds."""
    for kind in kinds:
        if kind.causal_offset is not None:
            return kind.causal_offset, tuple(other for other in kinds if other is not kind)
    return None, tuple(kinds)


def not_hidden(indices: Tensor, kinds: Sequence[Kind], site: Site, read: Reader) -> Tensor:
    """Indices of keys `[B, Sq, count]`, with -1 where one of the kinds, all `pair_by_pair`, hides the key from the
    query."""
    pairs = NamedPairs(site, read, indices.clamp_min(0))
    for kind in kinds:
        seen = kind.tensor(pairs)
        assert isinstance(seen, Tensor)
        assert seen.dtype == torch.bool
        indices = indices.masked_fill(~seen, -1)
    return indices
