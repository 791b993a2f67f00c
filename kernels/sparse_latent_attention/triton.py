"""Absorbed MLA over named keys on a GPU: `_common.kernel` with a list of keys for each query.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent [B, T, L], k_rope [B, T, R]   any strides but 1 in the last dim; only named keys are read
indices [B, Sq, topk]
latent_scales None, or [B, T, G] for a cache in FP8 or INT8
mask None, bool or floating, broadcast to [B, N, Sq, T]; only the elements of named keys are read
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.tiles import Tiles
from .arguments import SparseLatentAttention
from .aten import finished


def sparse_latent_attention_triton(
    x: SparseLatentAttention, machine: Machine, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine."""
    source = Source(
        kind="named",
        latent=x.latent,
        rope=x.k_rope,
        tokens=x.indices.shape[2],
        cached=x.latent.shape[1],
        table=x.indices,
        scales=x.latent_scales,
        mask=x.mask,
        causal=x.causal_offset is not None,
        causal_offset=0 if x.causal_offset is None else x.causal_offset,
    )
    return finished(x, *attend(machine, x.q_latent, x.q_rope, source, x.scale, tiles=tiles))
