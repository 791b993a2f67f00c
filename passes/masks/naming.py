"""Ways to name the keys of every query by their indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size, same, symbols_in
from ..algebra.terms import Read
from ..code.reading import Reader, symbols_of
from ..mla.site import Site
from .positions import Named


class Naming(ABC):
    """Names equally many keys for each query.

    A frozen dataclass. All fields that its code depends on take part in comparisons.
    """

    @property
    @abstractmethod
    def count(self) -> Size:
        """How many keys are named for a query."""

    @property
    @abstractmethod
    def reads(self) -> tuple[Read, ...]:
        """The reads that the indices are made of."""

    @property
    @abstractmethod
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that the code needs."""

    @abstractmethod
    def indices(self, site: Site, read: Reader) -> Tensor:
        """Indices `[B, Sq, count]` of a site's keys, -1 for none; no key is named twice."""


@dataclass(frozen=True)
class Listed(Naming):
    """The keys whose indices are in a tensor of the graph."""

    named: Named

    @property
    def count(self) -> Size:
        return self.named.named.size

    @property
    def reads(self) -> tuple[Read, ...]:
        return (self.named.indices,)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_of(self.named.indices) | symbols_in(self.named.key.size)

    def indices(self, site: Site, read: Reader) -> Tensor:
        named = self.named
        indices = read(named.indices, site.batch, site.tokens, (named.named,))
        if not same(named.extent, named.key.size):
            count: Any = read.realize(named.key.size)  # int or SymInt
            indices = indices.masked_fill(indices >= count, -1)
        if not named.distinct:
            indices = indices.sort(dim=-1).values
            again = indices[..., 1:] == indices[..., :-1]
            indices = torch.cat([indices[..., :1], indices[..., 1:].masked_fill(again, -1)], dim=-1)
        return indices


@dataclass(frozen=True)
class Window(Naming):
    """The `length` keys from `first` on, counted from the query's own index, so far as they exist."""

    first: Size
    length: Size

    @property
    def count(self) -> Size:
        return self.length

    @property
    def reads(self) -> tuple[Read, ...]:
        return ()

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.first, self.length)

    def indices(self, site: Site, read: Reader) -> Tensor:
        sizes = site.sizes
        given = sizes["B"], sizes["Sq"], sizes["T"], self.first, self.length
        batch, queries, keys, first, length = _realized(read, *given)
        device = site.node.meta["val"].device
        query = torch.arange(queries, device=device)[:, None]
        key = query + first + torch.arange(length, device=device)
        return key.masked_fill((key < 0) | (key >= keys), -1).expand(batch, -1, -1)


@dataclass(frozen=True)
class Every(Naming):
    """All keys, of which there are `keys`."""

    keys: Size

    @property
    def count(self) -> Size:
        return self.keys

    @property
    def reads(self) -> tuple[Read, ...]:
        return ()

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.keys)

    def indices(self, site: Site, read: Reader) -> Tensor:
        batch, queries, keys = _realized(read, *(site.sizes[name] for name in ("B", "Sq", "T")))
        key = torch.arange(keys, device=site.node.meta["val"].device)
        return key.expand(batch, queries, -1)


def _realized(read: Reader, *sizes: Size) -> list[Any]:
    """The sizes as ints or SymInts."""
    return [read.realize(size) for size in sizes]
