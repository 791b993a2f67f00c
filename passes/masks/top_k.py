"""Keys that a tensor of indices names, as a sparse attention's indexer does, or all but these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import same
from ..algebra.terms import Read
from ..mla.site import Site
from .kind import Kind
from .naming import Listed
from .pairs import Pairs
from .positions import Literal, Named


@dataclass(frozen=True)
class TopK(Kind):
    """A query attends to the keys that are named or, if inverted, to all others."""

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
        return Listed(self.named).symbols

    @property
    def names(self) -> Listed | None:
        return None if self.named.inverted else Listed(self.named)

    def tensor(self, pairs: Pairs) -> Tensor:
        site, named = pairs.site, self.named
        layout = (site.batch, site.heads, site.tokens, (named.named,))
        indices = pairs.read(named.indices, *layout, broadcast=False).long()
        keys: Any = pairs.read.realize(site.sizes["T"])  # int or SymInt
        extent: Any = keys if same(named.extent, site.sizes["T"]) else pairs.read.realize(named.extent)
        rows = indices.new_full((*indices.shape[:3], extent), named.inverted, dtype=torch.bool)
        return rows.scatter(-1, indices, not named.inverted).narrow(-1, 0, keys)


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """The named keys that a literal states, if it states any.

    Indices may name something else, such as the queries or the heads that attend at all, or depend on the key.
    """
    if not isinstance(literal, Named) or site.attention.keys != (literal.key,):
        return None
    return None if literal.key in literal.indices.axes else TopK(literal, origin)
