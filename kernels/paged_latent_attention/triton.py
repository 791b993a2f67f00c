"""Paged absorbed MLA on a GPU: `_common.kernel` with a block table.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent_pages [pages, page_size, L], rope_pages [pages, page_size, R]   any strides but 1 in the last dim
block_table [B, max_pages], seq_lens and first_positions [B], which need be contiguous
mask None, bool or floating, broadcast to [B, N, Sq, T]
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.tiles import Tiles

ONE_PAGE = 1 << 30
"""The size of pages of which a sequence has one, whatever it is: the kernel is compiled once for all, and takes every
tile of keys as a run."""


def paged_latent_attention_triton(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None,
    split_tokens: int | None,
    mask: Tensor | None,
    first_positions: Tensor | None,
    machine: Machine,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_latent_attention` on a machine, with checked arguments."""
    page_size = latent_pages.shape[1]
    source = Source(
        kind="pages",
        latent=latent_pages,
        rope=rope_pages,
        tokens=block_table.shape[1] * page_size,
        page_size=page_size if block_table.shape[1] > 1 else ONE_PAGE,
        table=block_table,
        lengths=seq_lens.contiguous(),
        starts=None if first_positions is None else first_positions.contiguous(),
        scales=latent_scales,
        mask=mask,
        causal=causal,
    )
    return attend(machine, q_latent, q_rope, source, scale, split_tokens, tiles)
