"""Absorbed MLA in C++ (`native.cpp`) for the few rows of a decode step: the implementation for CPU tensors.

In compiled graphs, `dispatcher/latent_attention.h` does the same without this Python code.

With 16 or 128 rows, the matrix products of `aten.py` are thin and far from what a core can do. Many queries go to
`many_queries.py`, if it is faster, and everything else to `aten.py`: float64, many rows of few keys, keys that are not
a range, no C++ compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked
from ..dispatcher import general
from ..visibility import Visibility, positions, take
from .arguments import LatentAttention
from .aten import attend as attend_with_aten
from .cached import KERNELS, MOST_ROWS, Cached, attend
from .many_queries import are_many, attend_many

Span = tuple[range, Visibility, range]
"""Sequences, what their queries see, and the keys to load for them."""


def attend_on_cpu(x: LatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    q_latent, latent, k_rope = x.q_latent, x.latent, x.k_rope
    if are_many(x):
        return attend_many(x)
    kernel = None
    if 0 < q_latent.shape[1] * q_latent.shape[2] <= MOST_ROWS and _cached(latent, k_rope).readable():
        kernel = KERNELS.of(q_latent.dtype, latent.dtype, k_rope.dtype)
    spans = _spans(x) if kernel else None
    if kernel is None or spans is None:
        return attend_with_aten(x)
    q = q_latent.contiguous(), x.q_rope.contiguous()
    o = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)
    for sequences, visibility, keys in spans:
        b = slice(sequences.start, sequences.stop)
        bias = visibility.bias(range(q_latent.shape[1]), keys, torch.float32)
        cached = _cached(take(latent[b], keys, 1), take(k_rope[b], keys, 1))
        attend(kernel, q[0][b], q[1][b], cached, len(keys), bias, x.scale, o[b], lse[b])
    return o, lse


def _spans(x: LatentAttention) -> list[Span] | None:
    """All sequences together, or each alone where their masks differ; None if the keys of one are not a range."""
    (batch, tokens), device, mask, causal_offset = x.latent.shape[:2], x.latent.device, x.mask, x.causal_offset
    if mask is not None and mask.dtype == torch.bool:
        if bool(mask.all()):
            mask = None
        elif mask.numel() == tokens and causal_offset is None:  # one row for all: which keys are loaded says it all
            keys = positions(mask.flatten())
            unmasked = Visibility(None, None, tokens, device)
            return [(range(batch), unmasked, keys)] if isinstance(keys, range) else None
    together = mask is None or mask.shape[0] == 1
    spans = []
    for sequences in [range(batch)] if together else [range(i, i + 1) for i in range(batch)]:
        seen = mask if mask is None or together else mask[sequences.start : sequences.stop]
        visibility = Visibility(seen, causal_offset, tokens, device)
        keys = visibility.keys(range(x.q_latent.shape[1]))
        if not isinstance(keys, range):
            return None
        spans.append((sequences, visibility, keys))
    return spans


def _cached(latent: Tensor, k_rope: Tensor) -> Cached:
    """Latents `[b, T, L]` and rope keys `[b, T, R]` as one page per sequence."""
    return Cached(latent[:, None], k_rope[:, None])


latent_attention_cpu = checked(LatentAttention, attend_on_cpu)
general("latent_attention")(latent_attention_cpu)
