"""MLA over pages with all keys and values up-projected, as the equation says: the oracle of every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from ..expanded_attention.reference import expanded_attention_reference
from ..paged_latent_attention.reference import keys
from .arguments import PagedExpandedAttention


def attend_sequence_by_sequence(x: PagedExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse `[B, Sq, N]`, both in the dtype of the queries, float64 included."""
    batch, queries, heads, _ = x.q.shape
    o = x.q.new_zeros((batch, queries, heads, x.w_uv.shape[1]))
    lse = x.q.new_full((batch, queries, heads), -torch.inf)
    for b, (length, start) in enumerate(zip(x.seq_lens.tolist(), x.starts.tolist(), strict=True)):
        count = queries if x.query_lens is None else int(x.query_lens[b])
        latent, k_rope = keys(x.pages, b, length, x.q.dtype)
        own = None if x.mask is None else x.mask.expand(batch, -1, queries, -1)[b : b + 1, :, :count]
        if own is not None and own.shape[3] != 1:
            own = own[..., :length]
        rows = x.q[b : b + 1, :count], latent[None], k_rope[None]
        rest = own, start if x.causal else None, x.scale, x.workspace_tokens
        result = expanded_attention_reference(*rows, x.w_uk, x.w_uv, *rest)
        o[b, :count], lse[b, :count] = result[0][0], result[1][0]
    return o, lse


paged_expanded_attention_reference = unchecked(PagedExpandedAttention, attend_sequence_by_sequence)
