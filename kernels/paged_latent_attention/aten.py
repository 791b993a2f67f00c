"""Paged absorbed MLA out of ATen operations: for whatever has no kernel of its own.

A sequence at a time, its pages are gathered a bounded chunk of keys after the other and attended to by
`mla::latent_attention`; what the chunks give is merged by its log-sum-exp:

    latent, k_rope   [1, C, L], [1, C, R]   of at most _CHUNK_ELEMENTS numbers, however long the sequence is
    o, lse           [1, Sq, N, L], [1, Sq, N]

Half precision is computed in float32, and what is merged stays float32. On CPU the lengths are read and only pages in
use are touched; elsewhere that would stall the device, so every page of the table is gathered, page 0 in place of those
out of use, and masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ..fp8 import bytes_of, dequantised
from .arguments import check_arguments

_CHUNK_ELEMENTS = 1 << 20
"""Elements of latent and rope key gathered at a time: 4 MiB in float32, what the attention over them also takes."""


def paged_latent_attention_aten(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None = None,
    split_tokens: int | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors.

    Sequences are computed alone, so every `split_tokens` gives results that do not depend on the batch.
    """
    tensors = q_latent, q_rope, latent_pages, rope_pages, block_table, seq_lens
    check_arguments(*tensors, latent_scales, split_tokens, mask, first_positions)
    batch, queries, heads, _ = q_latent.shape
    page_size = latent_pages.shape[1]
    capacity = block_table.shape[1] * page_size
    lengths = seq_lens.tolist() if seq_lens.is_cpu else [capacity] * batch
    starts = seq_lens - queries if first_positions is None else first_positions
    offsets = starts.tolist() if causal and seq_lens.is_cpu else [0] * batch
    chunk = max(_CHUNK_ELEMENTS // (latent_pages.shape[2] + rope_pages.shape[2]), 1)
    dtype = torch.promote_types(q_latent.dtype, torch.float32)
    q = q_latent.to(dtype), q_rope.to(dtype)
    o = q_latent.new_zeros(q_latent.shape, dtype=dtype)
    lse = q_latent.new_full((batch, queries, heads), -torch.inf, dtype=torch.float32)
    for b, length in enumerate(lengths):
        this = slice(b, b + 1)
        for start in range(0, length, chunk):
            positions = torch.arange(start, min(start + chunk, length), device=block_table.device)
            page, row = _place(block_table[b], positions, page_size, seq_lens[b])
            latent, k_rope = _load(latent_pages, rope_pages, latent_scales, page, row, dtype)
            visible, causal_offset = _part_of(mask, b, positions), offsets[b] - start if causal else None
            if not seq_lens.is_cpu:
                seen = _seen(positions, queries, seq_lens[b], starts[b] if causal else None)
                visible, causal_offset = _both(seen, visible), None
            part = torch.ops.mla.latent_attention(
                q[0][this], q[1][this], latent[None], k_rope[None], visible, causal_offset, scale
            )
            if start:
                part = torch.ops.mla.merge_states(o[this], lse[this], *part)
            o[this], lse[this] = part
    return o.to(q_latent.dtype), lse


def _place(table: Tensor, positions: Tensor, page_size: int, length: Tensor) -> tuple[Tensor, Tensor]:
    """Page and row `[C]` of each position; page 0 of a position that is not in use."""
    page = table.index_select(0, positions // page_size)
    if not length.is_cpu:
        page = page.masked_fill(positions >= length, 0)
    return page.long(), positions % page_size


def _seen(positions: Tensor, queries: int, length: Tensor, start: Tensor | None) -> Tensor:
    """Bool `[1, 1, Sq, C]`, True where a query attends to a position; `start` is that of the first, if causal."""
    seen = positions < length
    if start is not None:
        seen = seen & (positions <= start + torch.arange(queries, device=positions.device)[:, None])
    return seen.expand(1, 1, queries, -1)


def _part_of(mask: Tensor | None, b: int, positions: Tensor) -> Tensor | None:
    """What a mask says of sequence b at some positions, `[1, N|1, Sq|1, C|1]`."""
    if mask is None:
        return None
    own = mask if mask.shape[0] == 1 else mask[b : b + 1]
    return own if own.shape[3] == 1 else own.index_select(3, positions.clamp(max=own.shape[3] - 1))


def _both(seen: Tensor, mask: Tensor | None) -> Tensor:
    """A bool mask and any other in one."""
    if mask is None:
        return seen
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _load(
    latent_pages: Tensor,
    rope_pages: Tensor,
    latent_scales: Tensor | None,
    page: Tensor,
    row: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys `[C, L]` and `[C, R]` in `dtype`."""
    if latent_scales is None:
        return latent_pages[page, row].to(dtype), rope_pages[page, row].to(dtype)
    scales = latent_scales.expand(*latent_pages.shape[:2], -1)[page, row]
    return dequantised(bytes_of(latent_pages)[page, row], bytes_of(rope_pages)[page, row], scales, dtype)


torch.library.impl("mla::paged_latent_attention", "CompositeExplicitAutograd")(paged_latent_attention_aten)
