"""From scores to weights, written plainly: what the references share."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(queries: int, keys: int, causal_offset: int | None, device: torch.device) -> Tensor | None:
    """Bool `[Sq, T]`, True where query i may attend to key j <= i + causal_offset; None if there is no limit."""
    if causal_offset is None:
        return None
    last = torch.arange(queries, device=device)[:, None] + causal_offset
    return torch.arange(keys, device=device) <= last


def softmax_with_lse(scores: Tensor, mask: Tensor | None, causal: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dim of `[B, N, Sq, T]`, and its log-sum-exp `[B, N, Sq]`, in the dtype of the scores.

    A row with nothing to attend to has weights 0 and lse -inf.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal is not None:
        scores = scores.masked_fill(~causal, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(lse == -torch.inf, 0.0)
    return weights, lse.squeeze(-1)
