"""Absorbed MLA on a GPU: `_common.kernel` over rows that lie one after the other.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent [B, T, L], k_rope [B, T, R]   any strides but 1 in the last dim; no key is copied
mask None, bool or floating, broadcast to [B, N, Sq, T]
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.tiles import Tiles


def latent_attention_triton(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    machine: Machine,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::latent_attention` on a machine, with checked arguments."""
    source = Source(
        kind="rows",
        latent=latent,
        rope=k_rope,
        tokens=latent.shape[1],
        mask=mask,
        causal=causal_offset is not None,
        causal_offset=causal_offset or 0,
    )
    return attend(machine, q_latent, q_rope, source, scale, tiles=tiles)
