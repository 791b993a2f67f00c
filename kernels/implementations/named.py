"""Describe calls of `mla::sparse_latent_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._common.plans import layout
from .pages import Codes, coded_like, is_aligned
from .trial import normal_like

if TYPE_CHECKING:
    from ..sparse_latent_attention.arguments import SparseLatentAttention

_TOKENS, _NAMED = 300, 200
"""How many keys the trial's cache has, and how many of them each query names."""


@dataclass(frozen=True)
class Named:
    """A call, without its numbers of sequences, queries and keys."""

    dtype: torch.dtype
    """The dtype of the queries."""
    heads: int
    widths: tuple[int, int]
    """L and R."""
    codes: Codes | None
    aligned: bool
    """Whether latents and rope keys are rows at multiples of 16 bytes."""
    has_mask: bool

    @property
    def rows(self) -> int:
        """The number of rows, of heads, that attend to the keys of a query."""
        return self.heads

    @staticmethod
    def of(x: SparseLatentAttention) -> Named | None:
        """The problem of a call; None where sizes are symbols."""
        heads, rank, rope = *x.q_latent.shape[2:], x.q_rope.shape[3]
        places = *x.latent.stride(), *x.k_rope.stride(), x.latent.storage_offset(), x.k_rope.storage_offset()
        if not all(isinstance(size, int) for size in (heads, rank, rope, *places)):
            return None
        codes = None
        if x.latent_scales is not None:
            codes = Codes(x.latent.dtype, x.latent_scales.shape[2], x.k_rope.dtype == x.latent.dtype)
        aligned = is_aligned(x.latent) and is_aligned(x.k_rope)
        return Named(x.q_latent.dtype, heads, (rank, rope), codes, aligned, x.mask is not None)


def layout_of(x: SparseLatentAttention) -> Hashable:
    """Everything about the arguments that a choice may depend on."""
    asked = x.causal_offset is None, x.uniform_when_empty, is_aligned(x.latent), is_aligned(x.k_rope)
    tensors = x.q_latent, x.q_rope, x.latent, x.k_rope, x.indices, x.latent_scales, x.mask
    return asked, *map(layout, tensors)


def sizes_of(x: SparseLatentAttention) -> tuple[int, ...]:
    """The numbers of sequences and queries, of keys, and of names of keys."""
    return *x.q_latent.shape[:2], x.latent.shape[1], x.indices.shape[2]


def small(x: SparseLatentAttention) -> SparseLatentAttention:
    """Two sequences of two queries with the heads, widths and dtypes of `x`, to which some names are no keys; NaN where
    no query names a key."""
    (_, _, heads, rank), rope, device = x.q_latent.shape, x.q_rope.shape[3], x.q_latent.device
    normal = normal_like(x.q_latent)
    q = normal(2, 2, heads, rank + rope)
    rows = normal(2, _TOKENS, rank + rope)
    generator = torch.Generator(device).manual_seed(0)
    indices = torch.randint(-20, _TOKENS + 20, (2, 2, _NAMED), generator=generator, device=device)
    indices[1, 1] = -1
    places = indices.flatten(1)
    unnamed = torch.ones(2, _TOKENS + 1, dtype=torch.bool, device=device)
    unnamed.scatter_(1, places.where((places >= 0) & (places < _TOKENS), _TOKENS), False)
    unnamed = unnamed[:, :_TOKENS]
    rows = rows.masked_fill(unnamed[..., None], torch.nan)
    latent, scales = rows[..., :rank], None
    if x.latent_scales is not None:
        latent, scales = coded_like(latent, x.latent.dtype, x.latent_scales.shape, unnamed)
    return dataclasses.replace(
        x,
        q_latent=q[..., :rank],
        q_rope=q[..., rank:],
        latent=latent,
        k_rope=rows[..., rank:].to(x.k_rope.dtype),
        indices=indices.to(x.indices.dtype),
        causal_offset=None if x.causal_offset is None else _TOKENS // 2,
        scale=(rank + rope) ** -0.5,  # scores of a variance of 1
        uniform_when_empty=False,
        latent_scales=scales,
    )
