"""Chunked MLA as ATen operations that a graph can hold: a loop over chunks, whose number is known only at run time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..bundles import unchecked
from ..loop import Operands, Positions, attend_over_chunks
from ..scores import softmax_with_lse
from ..two_latents import latents_of
from .arguments import ExpandedAttention, Expansion
from .chunks import lost_rows


def attend_to_dense(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse, in a form that can be traced.

    At any time the keys and values of `workspace_tokens` tokens exist, for all sequences and heads, and the scores of
    all queries with one chunk, except on CPU, where flash attention keeps none.
    """
    dtype = torch.promote_types(x.q.dtype, torch.float32)

    def load(positions: Positions, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        latent, ropes = (part.index_select(1, positions.inside).to(dtype) for part in cache)
        return latent, ropes

    return attend_in_loop(x, load, (x.latent, x.ropes), x.causal_offset, x.latent.shape[1])


def attend_in_loop(
    x: Expansion,
    load: Callable[[Positions, Operands], tuple[Tensor, Tensor]],
    cache: Operands,
    causal_offset: int | torch.SymInt | Tensor | None,
    tokens: int,
    lengths: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o `[B, Sq, N, V]` and lse `[B, Sq, N]` of a bundle's queries under its mask.

    `load` gets the positions of a chunk and the cache, and returns latents `[B, C, L]` and rope keys
    `[B, C, 1 or N, R]` in at least float32. `tokens`, lengths and causal offset are those of `attend_over_chunks`.
    Padding, bool `[B, Sq]`, marks queries that do not count.
    """
    q, mask, weights = x.q, x.mask, (x.w_uk, x.w_uv)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_heads, level = q.transpose(1, 2).to(dtype), None
    if mask is not None and mask.dtype != torch.bool:
        lost, level = lost_rows(q.dtype, mask)
        q_heads, mask = q_heads.masked_fill(lost, 0.0), mask - level
    attend = _flash if q.is_cpu else _composed

    def attend_to_chunk(positions: Positions, bias: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        q_heads, cache, (w_uk, w_uv), padding = operands
        # Keys that no query sees may hold anything, and 0 times NaN is NaN.
        hidden = (bias == -torch.inf).all(1)
        if padding is not None:
            hidden = hidden | padding[..., None]
        hidden = hidden.all(1)[..., None]
        here, ropes = load(positions, cache)
        here, ropes = here.masked_fill(hidden, 0.0), ropes.masked_fill(hidden[..., None], 0.0)
        pairs = zip(latents_of(here, w_uk, w_uv), (w_uk, w_uv), strict=True)
        k_nope, v = (torch.matmul(own[:, None], w.transpose(1, 2)) for own, w in pairs)
        k = torch.cat([k_nope, ropes.transpose(1, 2).expand(-1, w_uk.shape[0], -1, -1)], dim=-1)
        return attend(q_heads, k, v, bias, x.scale)

    o, lse = attend_over_chunks(
        attend_to_chunk,
        (q_heads, cache, tuple(w.to(dtype) for w in weights), padding),
        mask,
        causal_offset,
        tokens,
        x.workspace_tokens,
        q_heads.new_zeros((*q_heads.shape[:3], weights[1].shape[1])),
        lengths,
    )
    lse = lse if level is None else lse + level.squeeze(-1)
    return o.transpose(1, 2).to(q.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q `[B, N, Sq, D]`, k `[B, N, C, D]`, v `[B, N, C, V]`, bias `[B|1, N|1, Sq, C]`: o `[B, N, Sq, V]`, lse.

    CPU flash attention requires D = V, hence the padding.
    """
    columns = v.shape[3]
    width = max(q.shape[3], columns)
    q, k, v = (torch.nn.functional.pad(t, (0, width - t.shape[3])).contiguous() for t in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    return o[..., :columns], lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)


def _composed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    weights, lse = softmax_with_lse(scale * (q @ k.mT), bias, None)
    return weights @ v, lse


expanded_attention_decomposition = unchecked(ExpandedAttention, attend_to_dense)
