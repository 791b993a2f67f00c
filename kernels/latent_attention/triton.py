"""Absorbed MLA on a GPU: `_common.kernel` over the consecutive rows of a dense cache.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent [B, T, L], k_rope [B, T, R]   any strides but 1 in the last dim; keys are not copied
mask None, bool or floating, broadcast to [B, N, Sq, T]
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.tiles import Tiles
from .arguments import LatentAttention


def latent_attention_triton(x: LatentAttention, machine: Machine, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine."""
    source = Source(
        kind="rows",
        latent=x.latent,
        rope=x.k_rope,
        tokens=x.latent.shape[1],
        mask=x.mask,
        causal=x.causal_offset is not None,
        causal_offset=0 if x.causal_offset is None else x.causal_offset,
    )
    return attend(machine, x.q_latent, x.q_rope, source, x.scale, tiles=tiles)
