"""Attention of packed sequences as that of blocks of queries, each of one sequence, to the pages of its keys.

    q [1, Tq, N, D], cu_seqlens  ->  [blocks, size, N, D]: the first `counts` queries of a block are of its sequence
    table [blocks, most keys], lengths and positions of the first queries [blocks], for ops of pages of one token
    o [blocks, size, N, V]       ->  [1, Tq, N, V]

However long the sequences are, there are no more blocks than `sum ceil(queries / size)` may be. What is computed grows
with the pairs that meet, and padding is less than a block a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..masks.sequences import Sequences
from ..nodes.shapes import hints_of, size_of
from .operands import Operands

_MANY = 32
"""Queries of a block of which an empty one a sequence is too much: few are less than the sizes that tell how many."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries, and their keys."""

    size: int
    rows: Tensor
    """`[blocks, size]`: which of all queries they have; some query behind the last of theirs."""
    counts: Tensor
    """`[blocks]`: how many they have."""
    table: Tensor
    lengths: Tensor
    causal: bool
    positions: Tensor | None
    mask: Tensor | None
    places: Tensor
    """`[Tq]`: where a query is among those of all blocks."""
    outside: Tensor
    """`[Tq]`: whether it is of no sequence."""
    beyond: Tensor
    """`[Tq]`: whether its sequence has more keys or queries than were said to be the most, and there is no room."""

    @classmethod
    def of(cls, x: Operands, told: Sequences, most: int) -> Blocks:
        """Blocks of at most `most` queries, for operands whose layout of keys is that of tokens."""
        packed, realize, device = told.packed, x.read.realize, x.latent.device
        own = told.lengths(x.read)
        tokens, keys = x.q_nope.shape[1], x.latent.shape[0]
        sequences: Any = realize(packed.sequences)
        longest: Any = _at_most(realize(packed.most_queries), tokens)
        width: Any = _at_most(realize(packed.most_keys), keys)
        size = _size(longest, most)
        blocks = (tokens + sequences * (size - 1)) // size
        if size >= _MANY:
            blocks = torch.sym_min(sequences * ((longest + size - 1) // size), blocks)

        ends = ((own.queries + size - 1) // size).cumsum(0)
        begins = ends - (own.queries + size - 1) // size
        block, row = torch.arange(blocks, device=device), torch.arange(size, device=device)
        sequence = torch.searchsorted(ends, block, right=True).clamp_max(ends.shape[0] - 1)
        before = (block - begins[sequence]) * size  # queries of its sequence
        exists = block < ends[-1]
        counts = (own.queries[sequence] - before).clamp(0, size).where(exists, 0)
        first = own.lead[sequence] + before
        lengths = own.keys[sequence].clamp(0, width).where(exists, 0)
        causal, mask = packed.right is not None, None
        key = torch.arange(width, device=device)
        if causal:
            lengths = torch.minimum(lengths, first + counts).clamp_min(0)
        if packed.left is not None:
            mask = (key >= (first[:, None] + row - packed.left)[..., None])[:, None]

        query = torch.arange(tokens, device=device)
        sequence_of, inside = own.of(query)
        place = begins[sequence_of] * size + query - own.query[sequence_of]
        return cls(
            size,
            rows=((own.query[sequence] + before)[:, None] + row).clamp(0, tokens - 1),
            counts=counts,
            table=(own.key[sequence][:, None] + key).clamp_max(keys - 1).int(),
            lengths=lengths,
            causal=causal,
            positions=first.clamp_min(-size) if causal else None,
            mask=mask,
            places=place.clamp(0, blocks * size - 1),
            outside=~inside,
            beyond=inside & ((own.keys[sequence_of] > width) | (place >= blocks * size)),
        )

    def split(self, q: Tensor) -> Tensor:
        """Queries `[1, Tq, N, D]` of each block, `[blocks, size, N, D]`."""
        return q[0][self.rows]

    def joined(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[1, Tq, N, V]` and log-sum-exps `[1, Tq, N]` of those of blocks.

        0 of no sequence; NaN, and not some number, where there were more keys than the most.
        """
        o, lse = (part.flatten(0, 1)[self.places] for part in (o, lse))
        o = o.masked_fill(self.outside[:, None, None], 0.0).masked_fill(self.beyond[:, None, None], math.nan)
        return o[None], lse.masked_fill(self.outside[:, None], -torch.inf)[None]


def _at_most(said: int | torch.SymInt, there: Any) -> Any:
    """The most tokens of a sequence, if a number was said that may be the same for all batches, no more than there are.

    What varies is taken as it is said: expressions of sizes take time to compile.
    """
    return torch.sym_min(said, there) if isinstance(said, int) else said


def _size(longest: int | torch.SymInt, most: int) -> int:
    """Queries of a block: those of the longest sequence, if that is known, or a power of two that has room for it now.

    Whatever it is, the blocks are right.
    """
    if isinstance(longest, int):
        return max(min(longest, most), 1)
    size = size_of(longest)
    if isinstance(size, int):
        return max(min(size, most), 1)
    now = int(size.subs(hints_of([size], longest.node.shape_env)))
    return min(1 << max(now - 1, 0).bit_length(), most)
