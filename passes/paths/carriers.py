"""What ops take of the masks of a site: each a form in which attention may be told which keys a query sees.

What they say of a mask comes from `masks.seen`, which is asked here alone.
"""

from __future__ import annotations

from typing import ClassVar, Self

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size
from ..algebra.terms import Read
from ..caches.stored import StoredKeys
from ..code.reading import Reader
from ..masks.meaning import Meaning
from ..masks.seen import Seen
from ..mla.site import Site


class Carrier:
    """A form of the masks of a site."""

    _kind: ClassVar[str]

    def __init__(self, site: Site, meaning: Meaning) -> None:
        self._seen = Seen(site, meaning)

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """The masks of a site in this form, None if ops do not take it of keys that are stored so, or it cannot be."""
        raise NotImplementedError

    @property
    def reads(self) -> list[Read]:
        """What it takes of the graph."""
        return self._seen.reads(self._kind)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are no tensor's."""
        return self._seen.symbols

    @property
    def said(self) -> tuple[object, ...]:
        """All that its code depends on."""
        return (self._kind, *self._seen.said(self._kind))

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        return self._seen.may_be_empty(self._kind)


class MaskAndOffset(Carrier):
    """A mask over all keys and the offset of a causal limit: of keys that are not in pages."""

    _kind = "dense"

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Any masks."""
        return None if keys.in_pages else cls(site, meaning)

    def emit(self, read: Reader) -> tuple[Tensor | None, int | torch.SymInt | None]:
        """`[B|1, N|1, Sq|1, T|1]`, bool if all just reject, else a number to add; and the offset."""
        return self._seen.mask(read)


class Lengths(Carrier):
    """Lengths and first positions, and a mask if those are not all: of keys in pages."""

    _kind = "paged"

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Any masks."""
        return cls(site, meaning) if keys.in_pages else None

    def emit(self, read: Reader, table: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """A mask, if it takes one; whether there is a causal limit; lengths, and positions of the first queries if
        those are not the last ones: `[B]`, int64, on the device of `table`."""
        return self._seen.in_pages(read, table)


class NamedKeys(Carrier):
    """The keys that each query names, and what limits them besides."""

    _kind = "sparse"

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Masks by which every query names its keys, for all heads alike."""
        return cls(site, meaning) if Seen(site, meaning).named is not None else None

    @property
    def uniform_when_empty(self) -> bool:
        """Whether a query that sees no key attends to all of them alike."""
        return self._seen.meaning.uniform_when_empty

    def emit(self, read: Reader) -> tuple[Tensor, int | torch.SymInt | None]:
        """Their indices, `[B, Sq, topk]`, -1 for none; and a causal offset that holds besides."""
        return self._seen.indices(read)

    def emit_slots(self, read: Reader, table: Tensor, rows: int | torch.SymInt) -> Tensor:
        """The rows of a pool that each query attends to, `[B, Sq, topk]`, -1 for none."""
        return self._seen.slots(read, table, rows)


def named_keys(site: Site, meaning: Meaning) -> Size | None:
    """How many keys each query names, None if they are not named one by one."""
    named = Seen(site, meaning).named
    return None if named is None else named.named.size


def has_lengths(site: Site, meaning: Meaning) -> bool:
    """Whether the masks of a site are numbers of keys, some of which only a run knows."""
    bounds = Seen(site, meaning).bounds
    return bounds is not None and bool(bounds.reads)
