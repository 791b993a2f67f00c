"""Attention of packed sequences on CPU, in place of torch's and flash-attn's GPU ops: a loop over the sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import varlen as varlen  # defines the op

FLASH_ATTENTION_2 = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float | None,
    window: tuple[int, int],
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o `[Tq, N, V]` and lse `[N, Tq]` of q `[Tq, N, D]`, k `[Tk, N, D]` and v `[Tk, N, V]`, sequence by sequence.

    Sums are in float32 at least. The last query of a sequence is at its last key; a query that sees no key gets 0.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    o, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), math.inf, dtype=torch.float32)
    left, right = window
    for b in range(len(starts[0]) - 1):
        (first, last), (begin, end) = (cu[b : b + 2].tolist() for cu in starts)
        end = end if used is None else begin + int(used[b])
        if first == last or begin == end:
            continue
        queries, (keys, values) = q[first:last].to(dtype), (t[begin:end].to(dtype) for t in (k, v))
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (keys, values))
        scores = torch.einsum("qnd,knd->nqk", queries, keys) * scale
        behind = torch.arange(end - begin) - torch.arange(last - first)[:, None] - (end - begin) + (last - first)
        hidden = (behind < -left) & (left >= 0) | (behind > right) & (right >= 0)
        scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        o[first:last] = torch.einsum("nqk,knd->qnd", weights, values).to(q.dtype)
        lse[:, first:last] = scores.logsumexp(-1)
    return o, lse


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make torch's op for packed sequences, and flash-attn's, compute on CPU."""

    def of_torch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: list[int] | None = None,
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        *_: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = window_size or (-1, -1)
        window = left, 0 if is_causal else right
        o, lse = attend(query, key, value, (cu_seq_q, cu_seq_k), scale, window, seqused_k)
        return o, lse, torch.zeros(2, dtype=torch.uint64)

    def of_flash_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        scale: float,
        causal: bool,
        left: int = -1,
        right: int = -1,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        o, lse = attend(q, k, v, (cu_seqlens_q, cu_seqlens_k), scale, (left, 0 if causal else right))
        return o, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)

    def fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)

    with (
        torch.library._scoped_library("torch_attn", "IMPL") as own,
        torch.library._scoped_library("flash_attn", "DEF") as other,
    ):
        own.impl("_varlen_attn", of_torch, "CPU", allow_override=True)
        other.define(FLASH_ATTENTION_2)
        other.impl("_flash_attn_varlen_forward", of_flash_attention, "CPU")
        torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", fake, lib=other)
        yield
