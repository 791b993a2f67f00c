"""Chunked MLA over pages as ATen operations that a graph can hold: a loop that reads each chunk's latents there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..expanded_attention.decomposition import attend_in_loop
from ..fp8 import bytes_of, dequantised
from ..loop import Operands, Positions
from ..pages import both


def paged_expanded_attention_decomposition(
    q: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    causal: bool,
    scale: float,
    workspace_tokens: int,
    latent_scales: Tensor | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
    query_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_expanded_attention`, to be traced; see `mla_compile.ops` for shapes and dtypes.

    As many turns as the longest sequence takes; keys and values exist as for `mla::expanded_attention`. Rope keys and
    scales of the whole table are gathered at once: they share memory with the latents, which a loop's inputs may not.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, page_size = q.shape[1], latent_pages.shape[1]
    capacity = block_table.shape[1] * page_size
    positions = torch.arange(capacity, device=q.device)
    starts = first_positions
    if starts is None:
        starts = seq_lens - (queries if query_lens is None else query_lens)
    lengths, padding = seq_lens, None
    if causal:  # what is behind the last query may be anything
        lengths = torch.minimum(seq_lens, starts + (queries if query_lens is None else query_lens)).clamp_min(0)
    if query_lens is not None:
        padding = torch.arange(queries, device=q.device) >= query_lens[:, None]
        q = q.masked_fill(padding[..., None, None], 0.0)
    in_use = torch.arange(block_table.shape[1], device=q.device) * page_size < lengths[:, None]
    table = block_table.masked_fill(~in_use, 0)
    rope = bytes_of(rope_pages)[table].flatten(1, 2)
    scales = None
    if latent_scales is not None:
        scales = latent_scales.expand(*latent_pages.shape[:2], -1)[table].flatten(1, 2)
    if mask is not None and mask.dtype != torch.bool and mask.shape[3] != 1:
        mask = both((positions[: mask.shape[3]] < lengths[:, None])[:, None, None], mask)

    def load(chunk: Positions, cache: Operands) -> tuple[Tensor, Tensor]:
        pages, table, rope, scales = cache
        page = table.index_select(1, chunk.inside // page_size)
        latent, k_rope = pages[page, chunk.inside % page_size], rope.index_select(1, chunk.inside)
        if scales is None:
            return latent.to(dtype), k_rope.to(dtype)
        return dequantised(latent, k_rope, scales.index_select(1, chunk.inside), dtype)

    o, lse = attend_in_loop(
        q,
        load,
        (bytes_of(latent_pages), table, rope, scales),
        (w_uk, w_uv),
        mask,
        starts if causal else None,
        scale,
        workspace_tokens,
        capacity,
        lengths,
        padding,
    )
    if padding is not None:
        o, lse = o.masked_fill(padding[..., None, None], 0.0), lse.masked_fill(padding[..., None], -torch.inf)
    return o, lse
