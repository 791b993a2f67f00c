"""The C++ kernel of attention over cached keys (`native.cpp`): how it is built and called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..native import AMX, ATTEND, NUMBER, PAIRS, TILE_SUMS, VECTOR, Kernels

_HERE = Path(__file__).parent
_OF_TILES = "tile_operands.h", "tiles.h", "byte_tiles.h"
OF_PRODUCTS = (
    *(VECTOR, NUMBER, ATTEND, PAIRS, AMX, TILE_SUMS),
    *(_HERE / name for name in ("keys.h", "floats.h", "dots.h", *_OF_TILES, "best.h")),
)
"""Headers of products of blocks of keys."""
MOST_ROWS = 256
"""Queries times heads up to which this kernel is faster than matrix products."""

KERNELS = Kernels(
    (*OF_PRODUCTS, _HERE / "call.h", _HERE / "native.cpp"),
    ("const void*",) * 4 + ("void*",) * 2 + ("uintptr_t",) * 5 + ("int64_t",) * 24 + ("float", "int64_t"),
    ("NUMBER", "LATENT", "ROPE"),
)
"""The kernels, by the dtypes of queries, latents and rope keys."""


@dataclass(frozen=True)
class Cached:
    """The keys of sequences.

    latent `[batches, pages, page_size, L]` and k_rope `[batches, pages, page_size, R]` have any strides but 1 in the
    last dim; scales is None or `[batches, pages, page_size, G]`, of any strides. Key j of sequence s is
    `[s // queries, table[s, j // page_size], j % page_size]`, where table `[sequences, columns]` is int64, or None for
    page 0.
    """

    latent: Tensor
    k_rope: Tensor
    scales: Tensor | None = None
    table: Tensor | None = None
    queries: int = 1

    def readable(self) -> bool:
        """Whether the last dims have the stride of 1 that the kernel requires."""
        return all(part.shape[3] < 2 or part.stride(3) == 1 for part in (self.latent, self.k_rope))


def attend(
    kernel: Callable[..., None],
    q_latent: Tensor,
    q_rope: Tensor,
    cached: Cached,
    keys: int,
    bias: Tensor | None,
    scale: float,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """Fill o, like q_latent, and lse `[sequences, Sq, N]`.

    q_latent is `[sequences, Sq, N, L]`, q_rope `[sequences, Sq, N, R]`; they, o and lse are contiguous. bias is float32
    `[sequences or 1, N or 1, Sq or 1, keys]`. lengths and offsets `[sequences]` are int64 and contiguous: the number of
    keys of each sequence, instead of `keys`; and query i sees keys up to i + offset.
    """
    sequences, query_count, heads, rank = q_latent.shape
    bias_strides = (0, 0, 0, 0)
    if bias is not None:
        by_sequence, by_head, by_query, by_key = bias.expand(sequences, heads, query_count, keys).stride()
        bias_strides = (by_sequence, by_query, by_head, by_key)
    scales, table = cached.scales, cached.table
    kernel(
        *(q_latent, q_rope, cached.latent, cached.k_rope, o, lse),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (scales, table, lengths, offsets, bias)),
        *(sequences, heads, query_count * heads, keys, rank, cached.k_rope.shape[3]),
        *(cached.queries, max(cached.latent.shape[2], 1), 0 if table is None else table.stride(0)),
        1 if scales is None else scales.shape[3],
        *cached.latent.stride()[:3],
        *cached.k_rope.stride()[:3],
        *((0, 0, 0, 0) if scales is None else scales.stride()),
        *bias_strides,
        scale,
        torch.get_num_threads(),
    )
