"""MLA over pages with all keys and values up-projected, as the equation says: the oracle of every other way."""

from __future__ import annotations

import torch
from torch import Tensor

from ..expanded_attention.reference import expanded_attention_reference
from ..paged_latent_attention.reference import keys
from ..pages import Pages


def paged_expanded_attention_reference(
    q: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
    query_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_expanded_attention` in the dtype of the queries, float64 included; lse keeps that dtype.

    Args: as `mla_compile.ops` says. Returns: o `[B, Sq, N, V]`, lse `[B, Sq, N]`.
    """
    batch, queries, heads, _ = q.shape
    o = q.new_zeros((batch, queries, heads, w_uv.shape[1]))
    lse = q.new_full((batch, queries, heads), -torch.inf)
    pages = Pages(latent_pages, rope_pages, block_table, seq_lens, latent_scales)
    for b, length in enumerate(seq_lens.tolist()):
        count = queries if query_lens is None else int(query_lens[b])
        start = length - count if first_positions is None else int(first_positions[b])
        latent, k_rope = keys(pages, b, length, q.dtype)
        own = None if mask is None else mask.expand(batch, -1, queries, -1)[b : b + 1, :, :count]
        if own is not None and own.shape[3] != 1:
            own = own[..., :length]
        rows = q[b : b + 1, :count], latent[None], k_rope[None]
        result = expanded_attention_reference(*rows, w_uk, w_uv, own, start if causal else None, scale)
        o[b, :count], lse[b, :count] = result[0][0], result[1][0]
    return o, lse
