"""Absorbed MLA in C++ (`native.cpp`) for the few rows of a decode step; what CPU tensors get.

The matrix products that `aten.py` is made of are thin then, with 16 or 128 rows, and far from what a core can do.
Everything else goes to `aten.py`: other dtypes than float32, many rows, keys that are no range, no C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..native import ATTEND, VECTOR, load
from ..visibility import Visibility, positions, take
from .aten import check_arguments, latent_attention_aten

_MOST_ROWS = 256
"""Queries times heads up to which this is faster than matrix products."""
_SOURCES = VECTOR, ATTEND, Path(__file__).with_name("native.cpp")
_ARGUMENTS = ("const float*",) * 5 + ("float*",) * 2 + ("int64_t",) * 14 + ("float", "int64_t")

Span = tuple[range, Visibility, range]
"""Sequences, what their queries see, and the keys to load for that."""


def latent_attention_cpu(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`mla::latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    check_arguments(q_latent, q_rope, latent, k_rope, mask)
    kernel = load(_SOURCES, _ARGUMENTS) if _suits(q_latent, latent, k_rope) else None
    spans = _spans(q_latent, latent, mask, causal_offset) if kernel else None
    if kernel is None or spans is None:
        return latent_attention_aten(q_latent, q_rope, latent, k_rope, mask, causal_offset, scale)
    q = q_latent.contiguous(), q_rope.contiguous()
    o = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty(q_latent.shape[:3])
    if len(spans) == 1:
        _attend(kernel, *q, latent, k_rope, *spans[0][1:], scale, o, lse)
        return o, lse
    for sequences, visibility, keys in spans:
        b = slice(sequences.start, sequences.stop)
        _attend(kernel, q[0][b], q[1][b], latent[b], k_rope[b], visibility, keys, scale, o[b], lse[b])
    return o, lse


def _suits(q_latent: Tensor, latent: Tensor, k_rope: Tensor) -> bool:
    dense = all(part.shape[2] < 2 or part.stride(2) == 1 for part in (latent, k_rope))
    return q_latent.dtype == torch.float32 and 0 < q_latent.shape[1] * q_latent.shape[2] <= _MOST_ROWS and dense


def _spans(q_latent: Tensor, latent: Tensor, mask: Tensor | None, causal_offset: int | None) -> list[Span] | None:
    """All sequences together, or each alone where the mask tells them apart; None if one's keys are no range."""
    batch, tokens = latent.shape[:2]
    if mask is not None and mask.dtype == torch.bool:
        if bool(mask.all()):
            mask = None
        elif mask.numel() == tokens and causal_offset is None:  # one row for all: the keys are all that it says
            keys = positions(mask.flatten())
            unmasked = Visibility(None, None, tokens, latent.device)
            return [(range(batch), unmasked, keys)] if isinstance(keys, range) else None
    together = mask is None or mask.shape[0] == 1
    spans = []
    for sequences in [range(batch)] if together else [range(i, i + 1) for i in range(batch)]:
        seen = mask if mask is None or together else mask[sequences.start : sequences.stop]
        visibility = Visibility(seen, causal_offset, tokens, latent.device)
        keys = visibility.keys(range(q_latent.shape[1]))
        if not isinstance(keys, range):
            return None
        spans.append((sequences, visibility, keys))
    return spans


def _attend(
    kernel: Callable[..., None],
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    visibility: Visibility,
    keys: range,
    scale: float,
    o: Tensor,
    lse: Tensor,
) -> None:
    """q `[b, Sq, N, L]`, `[b, Sq, N, R]`; cache `[b, T, L]`, `[b, T, R]`; out `[b, Sq, N, L]`, `[b, Sq, N]`."""
    batch, query_count, heads, rank = q_latent.shape
    if len(keys) != latent.shape[1]:
        latent, k_rope = take(latent, keys, 1), take(k_rope, keys, 1)
    bias = visibility.bias(range(query_count), keys, torch.float32)
    bias_strides = (0, 0, 0)
    if bias is not None:
        _, by_head, by_query, by_key = bias.expand(1, heads, query_count, len(keys)).stride()
        bias_strides = (by_query, by_head, by_key)
    kernel(
        q_latent,
        q_rope,
        latent,
        k_rope,
        latent if bias is None else bias,
        o,
        lse,
        *(batch, heads, query_count * heads, len(keys), rank, k_rope.shape[2]),
        *latent.stride()[:2],
        *k_rope.stride()[:2],
        *bias_strides,
        int(bias is not None),
        scale,
        torch.get_num_threads(),
    )


torch.library.impl("mla::latent_attention", "CPU")(latent_attention_cpu)
