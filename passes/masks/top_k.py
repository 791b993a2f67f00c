"""Keys that a tensor of indices names, as a sparse attention's indexer does, or all but these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.terms import Read
from ..code.reading import symbols_of
from ..mla.site import Site
from .kind import Kind
from .pairs import Pairs
from .positions import Literal, Named


@dataclass(frozen=True)
class TopK(Kind):
    """A query attends to the keys that are named, or, inverted, to the others."""

    named: Named
    origin: tuple[Kind, ...] = field(default=(), compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        return ("tensor",) if self.named.inverted else ("top-k",)

    @property
    def reads(self) -> tuple[Read, ...]:
        return (self.named.indices,)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_of(self.named.indices)

    @property
    def names(self) -> Named | None:
        return None if self.named.inverted else self.named

    def tensor(self, pairs: Pairs) -> Tensor:
        site, named = pairs.site, self.named
        layout = (site.batch, site.heads, site.tokens, (named.named,))
        indices = pairs.read(named.indices, *layout, broadcast=False).long()
        count: Any = pairs.read.realize(site.sizes["T"])  # int or SymInt
        rows = indices.new_full((*indices.shape[:3], count), named.inverted, dtype=torch.bool)
        return rows.scatter(-1, indices, not named.inverted)


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """Such keys, if that is what a literal says."""
    return TopK(literal, origin) if isinstance(literal, Named) else None
