"""A mask as two numbers for each sequence: how many keys it has, and where its queries stand among them.

    key j < length[b]  and  key j <= position[b] + query i

Attention over pages takes these in place of a mask, where the mask says no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size, known_at_most, symbols_in, total
from ..algebra.terms import Read
from ..code.reading import Reader
from ..mla.site import Site
from .meaning import Meaning
from .positions import Affine


@dataclass(frozen=True)
class Bounds:
    """A sequence has as many keys as the least of `lengths`; its first query stands at the least of `positions`.

    Where one of these is empty, there is no such limit. All are made of constants and of tensor elements that
    depend on the sequence alone.
    """

    lengths: tuple[Affine, ...]
    positions: tuple[Affine, ...]
    site: Site = field(compare=False, repr=False)

    @classmethod
    def of(cls, site: Site, meaning: Meaning) -> Bounds | None:
        """A meaning as bounds; None if a part of it is not a bound, or if hidden scores become a finite number."""
        found = [kind.bound(site) for kind in meaning.kinds]
        bounds = [bound for bound in found if bound is not None]
        if meaning.uniform_when_empty or len(bounds) < len(found):
            return None
        lengths = [length for bound in bounds for length in bound.lengths]
        return cls(tuple(lengths), tuple(position for bound in bounds for position in bound.positions), site)

    @property
    def reads(self) -> list[Read]:
        """The reads that the numbers are made of."""
        return [what for value in (*self.lengths, *self.positions) for what, _ in value.terms if isinstance(what, Read)]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are not sizes of a tensor."""
        return symbols_in(*(value.const for value in (*self.lengths, *self.positions)))

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        first = (*(length - Affine(1) for length in self.lengths), *self.positions)
        return any(value.terms or not known_at_most(0, value.const) for value in first)

    def in_pages(self, read: Reader, like: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """What attention over pages takes: no mask, whether there is a causal limit, lengths, and positions of the
        first queries.

        Lengths and positions are int64 `[B]`, on the device of `like`. Positions are None if there is no causal
        limit, or if the queries provably are the last keys of each sequence. Lengths are from 0 to T, and at most
        what the last query sees; positions are clamped to -Sq to T, which changes nothing.
        """
        keys, queries = self.site.sizes["T"], self.site.sizes["Sq"]
        count: Any = read.realize(keys)  # int or SymInt, as all sizes here
        rows: Any = read.realize(queries)

        def value(what: Affine) -> Tensor:
            const: Any = read.realize(what.const)
            known = torch.full((like.shape[0],), const, dtype=torch.int64, device=like.device)
            reads = [(term, factor) for term, factor in what.terms if isinstance(term, Read)]
            return sum((read(term, self.site.batch).to(known) * factor for term, factor in reads), known)

        def least(values: tuple[Affine, ...]) -> Tensor:
            return reduce(torch.minimum, map(value, values))

        causal = bool(self.positions)
        if not self.lengths and len(self.positions) == 1 and _within(self.positions[0], queries, keys):
            return None, causal, value(self.positions[0] + Affine(queries)), None
        length = least((Affine(keys), *self.lengths))
        if not causal:
            return None, causal, length.clamp_min(0), None
        position = least(self.positions).clamp(-rows, count)
        return None, causal, torch.minimum(length, position + rows).clamp_min(0), position


def _within(position: Affine, queries: Size, keys: Size) -> bool:
    """Whether the position after the last query is provably from 0 to T, and so a number of keys that exist."""
    last = total([position.const, queries])
    return not position.terms and known_at_most(0, last) and known_at_most(last, keys)
