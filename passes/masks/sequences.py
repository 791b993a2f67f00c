"""Sequences packed one behind the other: a query attends to keys of its own sequence, up to its place there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import symbols_in
from ..algebra.terms import Read
from ..attention.packed import Numbers, Packed
from ..code.reading import Reader
from .kind import Kind
from .pairs import Pairs


@dataclass(frozen=True)
class Lengths:
    """Of each sequence `[B]`, int64, where its queries and keys begin and how many there are."""

    query: Tensor
    queries: Tensor
    key: Tensor
    keys: Tensor

    @property
    def lead(self) -> Tensor:
        """How far behind its own number among the queries a query stands among the keys."""
        return self.keys - self.queries

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which sequence queries at `positions` are of, and whether they are of one; it is some number if not."""
        ends = self.query + self.queries
        sequence = torch.searchsorted(ends, positions, right=True)  # the first that ends behind it
        sequence = sequence.clamp_max(ends.shape[0] - 1)
        return sequence, (positions >= self.query[sequence]) & (positions < ends[sequence])


@dataclass(frozen=True)
class Sequences(Kind):
    """The sequences of packed queries and keys, and how far a query sees in its own."""

    packed: Packed
    may_be_empty = True
    """Whether a query may see no key."""

    @property
    def words(self) -> tuple[str, ...]:
        causal = () if self.packed.right is None else ("causal",)
        return ("sequences", *causal, *(() if self.packed.left is None else ("window",)))

    @property
    def reads(self) -> tuple[Read, ...]:
        packed = self.packed
        numbers = packed.queries, packed.keys, packed.used
        return tuple(each.read for each in numbers if each is not None)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.packed.most_queries, self.packed.most_keys)

    def lengths(self, read: Reader) -> Lengths:
        """Where the sequences are."""

        def numbers(what: Numbers) -> Tensor:
            return read(what.read, what.dim).long()

        packed = self.packed
        queries, keys = numbers(packed.queries), numbers(packed.keys)
        used = keys.diff() if packed.used is None else numbers(packed.used)
        return Lengths(queries[:-1], queries.diff(), keys[:-1], used)

    def tensor(self, pairs: Pairs) -> Tensor:
        """Whether they meet, all of them asked for: as many pairs as all queries have with all keys."""
        lengths = self.lengths(pairs.read)
        sequence, real = lengths.of(pairs.query)
        place = pairs.key - lengths.key[sequence]
        behind = place - (pairs.query - lengths.query[sequence] + lengths.lead[sequence])
        seen = [real, place >= 0, place < lengths.keys[sequence]]
        if self.packed.right is not None:
            seen.append(behind <= self.packed.right)
        if self.packed.left is not None:
            seen.append(behind >= -self.packed.left)
        return reduce(torch.logical_and, seen)
