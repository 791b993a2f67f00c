"""Divide attention of packed sequences into blocks of queries, each of one sequence, that attend to pages of its keys.

    q [1, Tq, N, D], cu_seqlens  ->  [blocks, size, N, D]: the first `counts` queries of a block are of its sequence
    table [blocks, most keys], lengths and positions of the first queries [blocks], for ops of pages of one token
    o [blocks, size, N, V]       ->  [1, Tq, N, V]

The number of blocks is a bound on `sum ceil(queries / size)`, however long the sequences are. What is computed grows
with the pairs that meet, and padding is less than a block for each sequence.
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
"""Block size from which an empty block for each sequence costs more than the expressions of sizes that avoid it."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries, and their keys."""

    size: int
    rows: Tensor
    """`[blocks, size]`: which of all queries each block has; behind its last one, any query."""
    counts: Tensor
    """`[blocks]`: how many queries each block has."""
    table: Tensor
    lengths: Tensor
    causal: bool
    positions: Tensor | None
    mask: Tensor | None
    places: Tensor
    """`[Tq]`: where each query is among those of all blocks."""
    outside: Tensor
    """`[Tq]`: whether a query is of no sequence."""
    beyond: Tensor
    """`[Tq]`: whether there is no room for a query, as its sequence has more keys or queries than the given maximum."""

    @classmethod
    def of(cls, x: Operands, told: Sequences, most: int) -> Blocks:
        """Blocks of at most `most` queries, for operands whose keys are laid out token by token."""
        packed, realize, device = told.packed, x.read.realize, x.latent.device
        own = told.spans(x.read)
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
        before = (block - begins[sequence]) * size  # queries of its sequence in the blocks before it
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
        """Outputs `[1, Tq, N, V]` and log-sum-exps `[1, Tq, N]`, from those of blocks.

        Outputs are 0 for queries of no sequence; NaN, rather than a wrong number, for those that have no room.
        """
        o, lse = (part.flatten(0, 1)[self.places] for part in (o, lse))
        o = o.masked_fill(self.outside[:, None, None], 0.0).masked_fill(self.beyond[:, None, None], math.nan)
        return o[None], lse.masked_fill(self.outside[:, None], -torch.inf)[None]


def _at_most(said: int | torch.SymInt, there: Any) -> Any:
    """The most tokens of a sequence: a fixed number, which may be given for all batches alike, but no more than exist.

    A number that varies is taken as it is given, since expressions of sizes take time to compile.
    """
    return torch.sym_min(said, there) if isinstance(said, int) else said


def _size(longest: int | torch.SymInt, most: int) -> int:
    """How many queries a block has, at most `most`: those of the longest sequence if known, else a power of two with
    room for them now.

    The blocks are right whatever the size is.
    """
    if isinstance(longest, int):
        return max(min(longest, most), 1)
    size = size_of(longest)
    if isinstance(size, int):
        return max(min(size, most), 1)
    now = int(size.subs(hints_of([size], longest.node.shape_env)))
    return min(1 << max(now - 1, 0).bit_length(), most)
