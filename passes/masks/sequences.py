"""Packed sequences: a query attends to keys of its own sequence, perhaps limited by its place there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import symbols_in
from ..algebra.terms import Read
from ..attention.packed import Packed, Vector
from ..code.reading import Reader
from .kind import Kind
from .pairs import Pairs


@dataclass(frozen=True)
class Spans:
    """For each sequence, where its queries and keys begin and how many there are: `[B]`, int64."""

    query: Tensor
    queries: Tensor
    key: Tensor
    keys: Tensor

    @property
    def lead(self) -> Tensor:
        """How far a query's position among the keys exceeds its number among the queries."""
        return self.keys - self.queries

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The sequence of the query at each of `positions`, and whether the query belongs to it;
        if not, it is arbitrary."""
        ends = self.query + self.queries
        sequence = torch.searchsorted(ends, positions, right=True)  # the first that ends after it
        sequence = sequence.clamp_max(ends.shape[0] - 1)
        return sequence, (positions >= self.query[sequence]) & (positions < ends[sequence])


@dataclass(frozen=True)
class Sequences(Kind):
    """The sequences of packed queries and keys, and how far a query sees in its own sequence."""

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

    def spans(self, read: Reader) -> Spans:
        """Where the sequences begin and how long they are."""

        def numbers(what: Vector) -> Tensor:
            return read(what.read, what.dim).long()

        packed = self.packed
        queries, keys = numbers(packed.queries), numbers(packed.keys)
        used = keys.diff() if packed.used is None else numbers(packed.used)
        return Spans(queries[:-1], queries.diff(), keys[:-1], used)

    def tensor(self, pairs: Pairs) -> Tensor:
        """Whether a query attends to a key, for all pairs of them: the tensor is all queries by all keys."""
        spans = self.spans(pairs.read)
        sequence, real = spans.of(pairs.query)
        place = pairs.key - spans.key[sequence]
        behind = place - (pairs.query - spans.query[sequence] + spans.lead[sequence])
        seen = [real, place >= 0, place < spans.keys[sequence]]
        if self.packed.right is not None:
            seen.append(behind <= self.packed.right)
        if self.packed.left is not None:
            seen.append(behind >= -self.packed.left)
        return reduce(torch.logical_and, seen)
