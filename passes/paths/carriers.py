"""The ways to tell an op which keys a query sees, depending on how the keys are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import sympy
import torch
from torch import Tensor

from ..algebra.terms import Read
from ..caches.dense import DenseKeysInSequences
from ..caches.stored import StoredKeys
from ..code.reading import Reader
from ..masks.bounds import Bounds
from ..masks.dense import Dense
from ..masks.meaning import Meaning
from ..masks.named_keys import NamedKeys
from ..masks.of_rank import OfRank
from ..masks.seen_keys import SeenKeys
from ..masks.sequences import Sequences
from ..mla.site import Site


@dataclass(frozen=True)
class Carrier(ABC):
    """The masks of a site, in one form that ops take."""

    told: SeenKeys

    @classmethod
    @abstractmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """The masks of a site in this form; None if they have none, or ops do not take it for keys stored as these."""

    @property
    def reads(self) -> list[Read]:
        """What it reads of the graph."""
        return [*self.told.reads]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that no tensor has."""
        return self.told.symbols

    @property
    def said(self) -> tuple[object, ...]:
        """All that its code depends on."""
        return (type(self).__name__, type(self.told).__name__, self.told, self.may_be_empty)

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        return self.told.may_be_empty


@dataclass(frozen=True)
class MaskAndOffset(Carrier):
    """A mask over all keys and the offset of a causal limit, for keys that are not in pages."""

    told: Dense | OfRank

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Any masks."""
        return None if keys.in_pages else cls(Dense.of(site, meaning))

    def emit(self, read: Reader) -> tuple[Tensor | None, int | torch.SymInt | None]:
        """The mask, `[B|1, N|1, Sq|1, T|1]`, bool if all masks only reject keys, else to be added; and the offset."""
        return self.told.mask(read)


@dataclass(frozen=True)
class Lengths(Carrier):
    """Lengths and first positions, and a mask if these do not say all, for keys in pages."""

    told: Bounds | Dense | OfRank

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Any masks."""
        return cls(Bounds.of(site, meaning) or Dense.of(site, meaning)) if keys.in_pages else None

    def emit(self, read: Reader, table: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """A mask, if one is needed; whether there is a causal limit; lengths; positions of the first queries, unless
        queries are the last tokens. Lengths and positions are `[B]`, int64, on the device of `table`."""
        return self.told.in_pages(read, table)


@dataclass(frozen=True)
class InSequences(Carrier):
    """Packed sequences, the same for all heads, for keys that lie one behind the other."""

    told: Sequences

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Packed sequences, and nothing else."""
        told = sequences_of(site, meaning)
        return cls(told) if told is not None and isinstance(keys, DenseKeysInSequences) else None


def sequences_of(site: Site, meaning: Meaning) -> Sequences | None:
    """The packed sequences of a meaning, if it says nothing else and there is one latent a token; else None."""
    match meaning.kinds:
        case (Sequences() as told,) if not site.batch:
            return told
    return None


@dataclass(frozen=True)
class Indices(Carrier):
    """The keys that each query names, and what else limits them."""

    told: NamedKeys

    @classmethod
    def of(cls, site: Site, meaning: Meaning, keys: StoredKeys) -> Self | None:
        """Masks by which every query names its keys, for all heads alike."""
        named = NamedKeys.of(site, meaning)
        return None if named is None else cls(named)
