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

from ..pages import Pages, both, mask_of
from ..visibility import reads_values
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
    pages = Pages(latent_pages, rope_pages, block_table, seq_lens, latent_scales)
    host = reads_values(seq_lens)
    starts = seq_lens - queries if first_positions is None else first_positions
    offsets = starts.tolist() if causal and host else [0] * batch
    if causal and not host:
        pages = pages.before(starts + queries)  # what is behind the last query may be anything
    chunk = max(_CHUNK_ELEMENTS // (latent_pages.shape[2] + rope_pages.shape[2]), 1)
    dtype = torch.promote_types(q_latent.dtype, torch.float32)
    q = q_latent.to(dtype), q_rope.to(dtype)
    o = q_latent.new_zeros(q_latent.shape, dtype=dtype)
    lse = q_latent.new_full((batch, queries, heads), -torch.inf, dtype=torch.float32)
    for b, stop in enumerate(pages.stops()):
        this = slice(b, b + 1)
        for start in range(0, stop, chunk):
            keys = range(start, min(start + chunk, stop))
            positions = torch.arange(keys.start, keys.stop, device=block_table.device)
            latent, k_rope = pages.load(b, positions, dtype)
            visible, causal_offset = mask_of(mask, b, keys), offsets[b] - start if causal else None
            if not host:
                seen = pages.seen(b, positions, queries, starts[b] if causal else None)
                visible, causal_offset = both(seen, visible), None
            part = torch.ops.mla.latent_attention(
                q[0][this], q[1][this], latent[None], k_rope[None], visible, causal_offset, scale
            )
            if start:
                part = torch.ops.mla.merge_states(o[this], lse[this], *part)
            o[this], lse[this] = part
    return o.to(q_latent.dtype), lse


torch.library.impl("mla::paged_latent_attention", "CompositeExplicitAutograd")(paged_latent_attention_aten)
