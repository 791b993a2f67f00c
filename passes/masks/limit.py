"""Inequalities of positions: `k < length[b]`, `k <= position[b, q]`, a window `k > q + s - w`."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from torch import Tensor

from ..algebra.sizes import symbols_in
from ..algebra.terms import Axis, Read
from ..mla.site import Site
from .kind import Bound, Kind, query_of
from .pairs import Pairs
from .positions import Affine, AtMost, Literal


@dataclass(frozen=True)
class Limit(Kind):
    """A query attends to the keys where `what <= 0`."""

    what: Affine
    words: tuple[str, ...] = field(default=("tensor",), compare=False)
    origin: tuple[Kind, ...] = field(default=(), compare=False)
    pair_by_pair = True

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple(what for what, _ in self.what.terms if isinstance(what, Read))

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.what.const)

    def tensor(self, pairs: Pairs) -> Tensor:
        return pairs.value(self.what) <= 0

    def bound(self, site: Site) -> Bound | None:
        """The bound, if the limit leaves each sequence its first keys, as many as the sequence and a query's index
        determine."""
        query = query_of(site)
        last = Affine(0, ((site.attention.keys[0], 1),)) - self.what  # the last key that is seen
        of_sequence = last if query is None else last - Affine(0, ((query, last.factor(query)),))
        if not all(isinstance(what, Read) and what.axes <= set(site.batch) for what, _ in of_sequence.terms):
            return None
        match last.factor(query):
            case 0:
                return Bound(lengths=(of_sequence + Affine(1),))
            case 1:
                return Bound(positions=(of_sequence,))
        return None


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """The limit that a literal states, if it is about keys, queries and elements of tensors alone."""
    if not isinstance(literal, AtMost):
        return None
    key, query = site.attention.keys[0], query_of(site)
    if any(isinstance(what, Axis) and what not in (key, query) for what, _ in literal.what.terms):
        return None
    return Limit(literal.what, (_word(literal.what, key, query),), origin)


def _word(what: Affine, key: Axis, query: Axis | None) -> str:
    by_query = query in what.axes if query is not None else len(what.terms) == 1
    match what.factor(key):
        case 1:
            return "causal" if by_query else "lengths"
        case -1:
            return "window"
    return "tensor"
