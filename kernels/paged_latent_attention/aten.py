"""Paged absorbed MLA from ATen operations, for everything without a kernel of its own.

For one sequence at a time, bounded chunks of keys are gathered from its pages and attended to by
`mla::latent_attention`; the results of the chunks are merged by their log-sum-exp:

    latent, k_rope   [1, C, L], [1, C, R]   of at most _CHUNK_ELEMENTS numbers, however long the sequence is
    o, lse           [1, Sq, N, L], [1, Sq, N]

Half precision is computed and merged in float32. On CPU the lengths are read and only pages in use are touched;
elsewhere that would stall the device, so every page of the table is gathered, page 0 in place of unused ones, and
masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..pages import both, mask_of
from ..visibility import reads_values
from .arguments import PagedLatentAttention

_CHUNK_ELEMENTS = 1 << 20
"""Elements of latent and rope key gathered at a time: 4 MiB in float32, the chunk of `latent_attention` too."""


def attend(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse. Sequences are computed one by one, so what `split_tokens` asks for holds for any value of it."""
    batch, queries, heads, _ = x.q_latent.shape
    pages, starts = x.pages, x.starts
    host = reads_values(x.seq_lens)
    offsets = starts.tolist() if x.causal and host else [0] * batch
    if x.causal and not host:
        pages = pages.before(starts + queries)  # keys after the last query may hold anything
    chunk = max(_CHUNK_ELEMENTS // (pages.rank + x.rope_pages.shape[2]), 1)
    dtype = torch.promote_types(x.q_latent.dtype, torch.float32)
    q = x.q_latent.to(dtype), x.q_rope.to(dtype)
    o = x.q_latent.new_zeros(x.q_latent.shape, dtype=dtype)
    lse = x.q_latent.new_full((batch, queries, heads), -torch.inf, dtype=torch.float32)
    for b, stop in enumerate(pages.stops()):
        this = slice(b, b + 1)
        for start in range(0, stop, chunk):
            keys = range(start, min(start + chunk, stop))
            positions = torch.arange(keys.start, keys.stop, device=x.block_table.device)
            latent, k_rope = pages.load(b, positions, dtype)
            visible, causal_offset = mask_of(x.mask, b, keys), offsets[b] - start if x.causal else None
            if not host:
                seen = pages.seen(b, positions, queries, starts[b] if x.causal else None)
                visible, causal_offset = both(seen, visible), None
            part = torch.ops.mla.latent_attention(
                q[0][this], q[1][this], latent[None], k_rope[None], visible, causal_offset, x.scale
            )
            if start:
                part = torch.ops.mla.merge_states(o[this], lse[this], *part)
            o[this], lse[this] = part
    return o.to(x.q_latent.dtype), lse


paged_latent_attention_aten = checked(PagedLatentAttention, attend)
implement("paged_latent_attention", "CompositeExplicitAutograd", paged_latent_attention_aten)
