"""The pairs of a query and a key at which a mask is wanted, as tensors while code is traced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..algebra.terms import Axis, Read
from ..code.reading import Reader
from ..mla.site import Site
from .positions import Affine


class Pairs(ABC):
    """Pairs of a query and a key of a site. All tensors at these pairs broadcast to one another."""

    def __init__(self, site: Site, read: Reader) -> None:
        self.site, self.read = site, read

    @property
    @abstractmethod
    def key(self) -> Tensor:
        """The index of the key."""

    @property
    def query(self) -> Tensor:
        """The index of the query."""
        count: Any = self.read.realize(self.site.sizes["Sq"])  # int or SymInt
        return torch.arange(count, device=self.key.device)[:, None]

    @abstractmethod
    def __call__(self, what: Read) -> Tensor:
        """The tensor that is read, over some of the axes of the scores."""

    def value(self, what: Affine) -> Tensor:
        """The value of an affine expression in positions, int64."""
        const: Any = self.read.realize(what.const)
        position = torch.zeros_like(self.key, dtype=torch.int64) + const
        for term, factor in what.terms:
            if term is self.site.attention.keys[0]:
                value = self.key
            else:
                value = self.query if isinstance(term, Axis) else self(term)
            position = position + factor * value.long()  # int32 may not hold the product
        return position


class AllPairs(Pairs):
    """All pairs: `[B|1, N|1, Sq|1, T|1]`."""

    @cached_property
    def key(self) -> Tensor:
        """`[1, 1, 1, T]`"""
        count: Any = self.read.realize(self.site.sizes["T"])
        return torch.arange(count, device=self.site.node.meta["val"].device)[None, None, None]

    def __call__(self, what: Read) -> Tensor:
        site = self.site
        return self.read(what, site.batch, site.heads, site.tokens, site.attention.keys, broadcast=False)


class NamedPairs(Pairs):
    """The pairs of each query with some keys of its own: `[B|1, Sq|1, topk|1]`. Tensors that depend on the head are not
    read."""

    def __init__(self, site: Site, read: Reader, key: Tensor) -> None:
        super().__init__(site, read)
        self._key = key

    @property
    def key(self) -> Tensor:
        """`[B, Sq, topk]`"""
        return self._key

    def __call__(self, what: Read) -> Tensor:
        site = self.site
        tensor = self.read(what, site.batch, site.tokens, site.attention.keys, broadcast=False)
        if site.attention.keys[0] not in what.axes:
            return tensor
        return tensor.expand(*self.key.shape[:2], -1).gather(2, self.key.long())
