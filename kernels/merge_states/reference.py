"""Merging partial attentions as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states_reference(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`mla::merge_states` in the dtype of its inputs.

    Args: o_a and o_b `[..., V]`, lse_a and lse_b `[...]`. Returns: o `[..., V]`, lse `[...]`.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    o = torch.exp(lse_a - base)[..., None] * o_a + torch.exp(lse_b - base)[..., None] * o_b
    return o, lse
