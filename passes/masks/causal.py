"""Keys up to a query's own position: `k <= q + s`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import Tensor

from ..algebra.sizes import Size, known_at_most, symbols_in, total
from ..mla.site import Site
from .kind import Bound, Kind, query_of
from .pairs import Pairs
from .positions import Affine, AtMost, Literal


@dataclass(frozen=True)
class Causal(Kind):
    """Query i attends to keys j <= i + offset."""

    offset: Size
    origin: tuple[Kind, ...] = field(default=(), compare=False)
    words = ("causal",)
    reads = ()
    pair_by_pair = True

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.offset)

    @property
    def causal_offset(self) -> Size:
        return self.offset

    def tensor(self, pairs: Pairs) -> Tensor:
        offset: Any = pairs.read.realize(self.offset)  # int or SymInt
        return pairs.key <= pairs.query + offset

    def bound(self, site: Site) -> Bound:
        if query_of(site) is None:
            return Bound(lengths=(Affine(total([self.offset, 1])),))
        return Bound(positions=(Affine(self.offset),))

    def implies(self, other: Kind) -> bool:
        return isinstance(other, Causal) and known_at_most(self.offset, other.offset)


def after_query(site: Site) -> Affine:
    """How far a key is beyond its query, both counted from 0."""
    query = query_of(site)
    here = Affine(0, ((query, 1),)) if query is not None else Affine()
    return Affine(0, ((site.attention.keys[0], 1),)) - here


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """The causal limit that a literal states, if it states one."""
    if not isinstance(literal, AtMost):
        return None
    rest = literal.what - after_query(site)
    return None if rest.terms else Causal(total([-1 * rest.const]), origin)
