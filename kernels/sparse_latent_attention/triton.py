"""Absorbed MLA over named keys on a GPU: `_common.kernel` with a list of keys for each query.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent [B, T, L], k_rope [B, T, R]   any strides but 1 in the last dim; only the keys named are read
indices [B, Sq, topk]
latent_scales None, or [B, T, G] for a cache in FP8
mask None, bool or floating, broadcast to [B, N, Sq, T]; only the elements of the keys named are read
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.tiles import Tiles
from .aten import uniform_where_empty


def sparse_latent_attention_triton(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    uniform_when_empty: bool,
    latent_scales: Tensor | None,
    machine: Machine,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::sparse_latent_attention` on a machine, with checked arguments."""
    source = Source(
        kind="named",
        latent=latent,
        rope=k_rope,
        tokens=indices.shape[2],
        cached=latent.shape[1],
        table=indices,
        scales=latent_scales,
        mask=mask,
        causal=causal_offset is not None,
        causal_offset=causal_offset or 0,
    )
    o, lse = attend(machine, q_latent, q_rope, source, scale, tiles=tiles)
    return (uniform_where_empty(o, lse, latent, latent_scales) if uniform_when_empty else o), lse
