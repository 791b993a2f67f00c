"""A mask as two numbers a sequence: how many keys it has, and where its queries stand among them.

    key j < length[b]  and  key j <= position[b] + query i

What attention over pages takes in place of a mask, where that is all that the mask says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size, total
from ..algebra.terms import Read
from ..code.reading import Reader
from ..mla.site import Site
from .meaning import Meaning
from .positions import Affine


@dataclass(frozen=True)
class Bounds:
    """The least of `lengths` is the number of a sequence's keys, the least of `positions` that of its first query.

    No number of either kind: no such limit. All are made of elements that a sequence has, and constants.
    """

    lengths: tuple[Affine, ...]
    positions: tuple[Affine, ...]

    @property
    def reads(self) -> list[Read]:
        return [what for value in (*self.lengths, *self.positions) for what, _ in value.terms if isinstance(what, Read)]

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        first = (*(length - Affine(1) for length in self.lengths), *self.positions)
        return any(value.terms or not sympy.sympify(value.const).is_nonnegative for value in first)


def bounds_of(site: Site, meaning: Meaning) -> Bounds | None:
    """What a mask says as bounds; None if it says anything else."""
    if meaning.tensors or meaning.elements or meaning.named or meaning.uniform_when_empty:
        return None
    key = Affine(0, ((site.attention.keys[0], 1),))
    query = site.tokens[0] if site.tokens else None
    lengths: list[Affine] = []
    positions: list[Affine] = []
    if meaning.causal_offset is not None and query is None:
        lengths.append(Affine(total([meaning.causal_offset, 1])))
    elif meaning.causal_offset is not None:
        positions.append(Affine(meaning.causal_offset))
    for limit in meaning.limits:
        last = key - limit.what  # the last key that is seen
        of_sequence = last if query is None else last - Affine(0, ((query, last.factor(query)),))
        if not all(isinstance(what, Read) and what.axes <= set(site.batch) for what, _ in of_sequence.terms):
            return None
        match last.factor(query):
            case 0:
                lengths.append(of_sequence + Affine(1))
            case 1:
                positions.append(of_sequence)
            case _:
                return None
    return Bounds(tuple(lengths), tuple(positions))


def emit_bounds(bounds: Bounds, site: Site, read: Reader, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Lengths and, if there is a causal limit, positions of the first queries: `[B]`, int64, on the device of `like`.

    Lengths are from 0 to T, and at most what the last query sees; positions from -Sq to T, which says as much as any.
    """
    keys, queries = site.sizes["T"], site.sizes["Sq"]
    count: Any = read.realize(keys)  # int or SymInt, as all sizes here
    rows: Any = read.realize(queries)

    def value(what: Affine) -> Tensor:
        const: Any = read.realize(what.const)
        known = torch.full((like.shape[0],), const, dtype=torch.int64, device=like.device)
        reads = [(term, factor) for term, factor in what.terms if isinstance(term, Read)]
        return sum((read(term, site.batch).to(known) * factor for term, factor in reads), known)

    def least(values: tuple[Affine, ...]) -> Tensor:
        return reduce(torch.minimum, map(value, values))

    if not bounds.lengths and len(bounds.positions) == 1 and _within(bounds.positions[0], queries, keys):
        return value(bounds.positions[0] + Affine(queries)), None
    length = least((Affine(keys), *bounds.lengths))
    if not bounds.positions:
        return length.clamp_min(0), None
    position = least(bounds.positions).clamp(-rows, count)
    return torch.minimum(length, position + rows).clamp_min(0), position


def _within(position: Affine, queries: Size, keys: Size) -> bool:
    """Whether the queries provably are the last of keys that are there."""
    last = total([position.const, queries])
    return not position.terms and all(sympy.sympify(size).is_nonnegative for size in (last, total([keys, -1 * last])))
