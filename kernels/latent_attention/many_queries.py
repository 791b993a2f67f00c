"""Absorbed MLA of many bfloat16 queries in C++: to the kernel of expanded attention, latents are keys and values.

    q     [H, Sq, L + R]
    k, v  [H, C, L]          one copy for all heads: as keys with L last, as values with the keys last

Where a CPU multiplies pairs of bfloat16, this takes about half the time of the float32 products of `aten.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..expanded_attention.chunks import HEADS, Keys, attend_heads, leveled, of_heads
from ..expanded_attention.native import KERNELS, Native
from ..native import dtype_of_keys
from ..visibility import KeyPositions, Visibility, take
from .arguments import LatentAttention

_FEWEST_QUERIES = 32
"""Queries of each head from which its panels of queries are full."""
_TOKENS = 4096
"""Keys at a time."""


@dataclass(frozen=True)
class Shared:
    """Keys and values that are the latents themselves, for a number of heads."""

    heads: int
    tokens: int
    """The most tokens of a chunk."""

    def expand(self, latent: Tensor, ropes: Tensor) -> Keys:
        """Latents `[C, L]`, beside rope keys `[C, 1, R]`, as keys and values of every head."""
        by_token, by_column = latent.contiguous(), latent.T.contiguous().T
        nope, v = (part.expand(self.heads, -1, -1) for part in (by_token, by_column))
        return Keys(nope, ropes.transpose(0, 1), v)


def are_many(x: LatentAttention) -> bool:
    """Whether these are queries that `attend_many` takes."""
    dtype = x.q_latent.dtype
    if dtype != torch.bfloat16 or x.q_latent.shape[1] < _FEWEST_QUERIES or not x.latent.shape[1]:
        return False
    kernel = KERNELS.of(dtype)
    return kernel is not None and dtype_of_keys(kernel, dtype) == dtype


def attend_many(x: LatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    kernel = KERNELS.of(x.q_latent.dtype)
    assert kernel is not None
    arithmetic = Native(kernel, x.q_latent.dtype)
    q, mask, level = leveled(torch.cat([x.q_latent, x.q_rope], -1), x.mask)
    o = q.new_empty(x.q_latent.shape)  # `attend_heads` sums in float32
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for b in range(q.shape[0]):

        def load(keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            return take(x.latent[b], keys, 0).to(dtype), take(x.k_rope[b], keys, 0).to(dtype)[:, None]

        seen = mask if mask is None or mask.shape[0] == 1 else mask[b : b + 1]
        visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
        for start in range(0, q.shape[2], HEADS):
            group = slice(start, start + HEADS)
            attend_heads(
                q[b, :, group].transpose(0, 1),
                load,
                partial(Shared, min(HEADS, q.shape[2] - start)),
                of_heads(visibility, group),
                x.scale,
                _TOKENS,
                arithmetic,
                out=(o[b, :, group].transpose(0, 1), lse[b, :, group].transpose(0, 1)),
            )
    return o, lse if level is None else lse.add_(level)
