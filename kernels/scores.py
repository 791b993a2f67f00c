"""Masks and softmax of the references, written plainly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def causal_mask(queries: int, keys: int, causal_offset: int | None, device: torch.device) -> Tensor | None:
    """Bool `[Sq, T]`, True where query i may attend to key j <= i + causal_offset; None if there is no limit."""
    if causal_offset is None:
        return None
    last = torch.arange(queries, device=device)[:, None] + causal_offset
    return torch.arange(keys, device=device) <= last


def blanked(parts: tuple[Tensor, ...], mask: Tensor | None, causal: Tensor | None) -> tuple[Tensor, ...]:
    """The parts `[B, T, ...]` with 0 for keys that a bool mask or a causal limit hides from every query.

    Such keys may hold anything, and 0 times NaN is NaN. mask `[B or 1, N or 1, Sq or 1, T or 1]`, causal `[Sq, T]`.
    """
    seen = None if mask is None or mask.dtype != torch.bool else mask.any(1)
    if causal is not None:
        seen = causal[None] if seen is None else seen & causal
    if seen is None:
        return parts
    hidden = ~seen.any(1)
    return tuple(part.masked_fill(hidden[(..., *[None] * (part.dim() - 2))], 0.0) for part in parts)


def softmax_with_lse(scores: Tensor, mask: Tensor | None, causal: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dim of `[B, N, Sq, T]`, and its log-sum-exp `[B, N, Sq]`, in the dtype of the scores.

    A row with nothing to attend to has weights 0 and lse -inf.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal is not None:
        scores = scores.masked_fill(~causal, -torch.inf)
    lse = _logsumexp(scores)
    weights = torch.softmax(scores, dim=-1).masked_fill(lse == -torch.inf, 0.0)
    return weights, lse.squeeze(-1)


def _logsumexp(scores: Tensor) -> Tensor:
    """Log-sum-exp over the last dim, which is kept; -inf if there are no scores.

    torch's own branches on whether there are any, which a graph may not know before it runs.
    """
    if statically_known_true(scores.numel() > 0):
        return torch.logsumexp(scores, dim=-1, keepdim=True)
    scores = torch.cat([scores, scores.new_full((*scores.shape[:-1], 1), -torch.inf)], dim=-1)
    highest = scores.amax(dim=-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    return (scores - highest).exp().sum(dim=-1, keepdim=True).log() + highest
