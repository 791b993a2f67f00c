"""Chunked MLA over pages, a sequence at a time: what CPU tensors get, and what others do where no kernel suits.

A chunk is gathered from its pages, in float32 for half precision and FP8, and goes the way of `expanded_attention`'s
chunks: up-projected into the workspace, and attended to by its C++ or by flash attention. On CPU the lengths are read,
so only pages in use are touched and padding is left out; elsewhere that would stall the device, so all that the table
has room for is gathered, and hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ..expanded_attention.aten import attend_by_flash
from ..expanded_attention.chunks import attend_sequence, leveled
from ..expanded_attention.native import attend_on_cpu
from ..pages import Pages, both, mask_of
from ..visibility import KeyPositions, Visibility, reads_values
from .arguments import check_arguments


def paged_expanded_attention_aten(
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
    """`mla::paged_expanded_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    pages = Pages(latent_pages, rope_pages, block_table, seq_lens, latent_scales)
    check_arguments(q, pages, w_uk, w_uv, workspace_tokens, mask, first_positions, query_lens)
    batch, queries, heads, _ = q.shape
    host = reads_values(seq_lens)
    starts = first_positions
    if starts is None:
        starts = seq_lens - (queries if query_lens is None else query_lens)
    offsets = starts.tolist() if causal and host else [None] * batch
    counts = query_lens.tolist() if query_lens is not None and host else [queries] * batch
    attend = attend_on_cpu(q.dtype) if q.is_cpu else attend_by_flash
    o = q.new_zeros((batch, queries, heads, w_uv.shape[1]))
    lse = q.new_full((batch, queries, heads), -torch.inf, dtype=torch.float32)
    padding = None
    if query_lens is not None and not host:
        padding = torch.arange(queries, device=q.device) >= query_lens[:, None]
        q = q.masked_fill(padding[..., None, None], 0.0)
    if causal and not host:  # what is behind the last query may be anything
        pages = pages.before(starts + (queries if query_lens is None else query_lens))
    for b, (stop, count, offset) in enumerate(zip(pages.stops(), counts, offsets, strict=True)):
        if not stop or not count:
            continue
        seen = mask_of(mask, b, range(stop))
        if not host:
            positions = torch.arange(stop, device=q.device)
            seen = both(pages.seen(b, positions, queries, starts[b] if causal else None), seen)
            if padding is not None:
                seen = both(~padding[b][:, None], seen)
        if seen is not None and seen.shape[2] != 1:
            seen = seen[:, :, :count]

        def load(keys: KeyPositions, dtype: torch.dtype, b: int = b) -> tuple[Tensor, Tensor]:
            places = keys if isinstance(keys, Tensor) else torch.arange(keys.start, keys.stop, device=q.device)
            return pages.load(b, places, dtype)

        rows, seen, level = leveled(q[b : b + 1, :count], seen)
        attend_sequence(
            rows[0],
            load,
            (w_uk, w_uv),
            Visibility(seen, offset, stop, q.device),
            scale,
            workspace_tokens,
            attend,
            out=(o[b, :count], lse[b, :count]),
        )
        if level is not None:
            lse[b, :count] += level[0]
    if padding is not None:
        o, lse = o.masked_fill(padding[..., None, None], 0.0), lse.masked_fill(padding[..., None], -torch.inf)
    return o, lse


torch.library.impl("mla::paged_expanded_attention", "CompositeExplicitAutograd")(paged_expanded_attention_aten)
