"""Paged absorbed MLA on a GPU: `_common.kernel` with a block table.

q_latent [B, Sq, N, L], q_rope [B, Sq, N, R]
latent_pages [pages, page_size, L], rope_pages [pages, page_size, R]   any strides but 1 in the last dim
block_table [B, max_pages], seq_lens and first_positions [B], any strides
mask None, bool or floating, broadcast to [B, N, Sq, T]
"""

from __future__ import annotations

from torch import Tensor

from .._common.launch import Source, attend
from .._common.machine import Machine
from .._common.sizes import always
from .._common.tiles import Tiles
from .arguments import PagedLatentAttention

ONE_PAGE = 1 << 30
"""The page size that the kernel is given where each sequence has one page, whatever its real size: the kernel is then
compiled once for all sizes, and takes every tile of keys as consecutive rows."""


def is_for_a_page_size(x: PagedLatentAttention) -> bool:
    """Whether the kernel is compiled for the size of the pages: where sequences may have several."""
    return not always(x.block_table.shape[1] <= 1)


def paged_latent_attention_triton(
    x: PagedLatentAttention, machine: Machine, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine."""
    page_size = x.latent_pages.shape[1]
    source = Source(
        kind="pages",
        latent=x.latent_pages,
        rope=x.rope_pages,
        tokens=x.block_table.shape[1] * page_size,
        page_size=int(page_size) if is_for_a_page_size(x) else ONE_PAGE,
        table=x.block_table,
        lengths=x.seq_lens.contiguous(),
        starts=None if x.first_positions is None else x.first_positions.contiguous(),
        scales=x.latent_scales,
        mask=x.mask,
        causal=x.causal,
    )
    return attend(machine, x.q_latent, x.q_rope, source, x.scale, x.split_tokens, tiles)
