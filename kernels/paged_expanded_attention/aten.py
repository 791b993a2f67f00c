"""Chunked MLA over pages, a sequence at a time: the CPU implementation, and that of other devices without a kernel.

A chunk is gathered from its pages, in the dtype of the arithmetic, and then handled like a chunk of
`expanded_attention`: up-projected into the workspace, and attended to by its C++ kernel or by flash attention. On CPU
the lengths are read, so that only pages in use are touched and padding is skipped; elsewhere that would stall the
device, so everything that the table has room for is gathered, and masked. On CPU, in compiled graphs without a mask,
`dispatcher/paged_expanded_attention.h` does the same without this Python code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..dispatcher import general
from ..expanded_attention.aten import Flash
from ..expanded_attention.chunks import attend_sequence, leveled
from ..expanded_attention.native import fastest
from ..pages import both, mask_of
from ..visibility import KeyPositions, Visibility, reads_values
from .arguments import PagedExpandedAttention, zero


def attend(x: PagedExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    q, pages, starts = x.q, x.pages, x.starts
    (batch, queries, heads, _), device = q.shape, q.device
    host = reads_values(x.seq_lens)
    padding = None if host else x.padding
    offsets = starts.tolist() if x.causal and host else [None] * batch
    counts = x.query_lens.tolist() if x.query_lens is not None and host else [queries] * batch
    arithmetic = fastest(q.dtype) if q.is_cpu else Flash.of(q.dtype)
    o = q.new_zeros((batch, queries, heads, x.w_uv.shape[1]))
    lse = q.new_full((batch, queries, heads), -torch.inf, dtype=torch.float32)
    if padding is not None:
        q = q.masked_fill(padding[..., None, None], 0.0)
    if x.causal and not host:  # keys after the last query may hold anything
        pages = pages.before(starts + x.counts)
    for b, (stop, count, offset) in enumerate(zip(pages.stops(), counts, offsets, strict=True)):
        if not stop or not count:
            continue
        seen = mask_of(x.mask, b, range(stop))
        if not host:
            positions = torch.arange(stop, device=device)
            seen = both(pages.seen(b, positions, queries, starts[b] if x.causal else None), seen)
            if padding is not None:
                seen = both(~padding[b][:, None], seen)
        if seen is not None and seen.shape[2] != 1:
            seen = seen[:, :, :count]

        def load(heads: slice, keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            places = keys if isinstance(keys, Tensor) else torch.arange(keys.start, keys.stop, device=device)
            # Scales are float32; multiplying in float32 rounds the result only once.
            wide = dtype if pages.scales is None else torch.promote_types(dtype, torch.float32)
            latent, k_rope = pages.load(b, places, wide)
            return latent.to(dtype), k_rope.to(dtype)[:, None]

        rows, seen, level = leveled(q[b : b + 1, :count], seen)
        attend_sequence(
            x, rows[0], load, Visibility(seen, offset, stop, device), arithmetic, out=(o[b, :count], lse[b, :count])
        )
        if level is not None:
            lse[b, :count] += level[0]
    return zero((o, lse), padding)


paged_expanded_attention_aten = checked(PagedExpandedAttention, attend)
implement("paged_expanded_attention", "CompositeExplicitAutograd", paged_expanded_attention_aten)
general("paged_expanded_attention")(paged_expanded_attention_aten)
