"""Merging partial attentions as the equation says: the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import unchecked
from .arguments import MergeStates


def merge_by_weights(x: MergeStates) -> tuple[Tensor, Tensor]:
    """o `[..., V]` and lse `[...]`, in the dtype of the inputs."""
    lse = torch.logaddexp(x.lse_a, x.lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    o = torch.exp(x.lse_a - base)[..., None] * x.o_a + torch.exp(x.lse_b - base)[..., None] * x.o_b
    return o, lse


merge_states_reference = unchecked(MergeStates, merge_by_weights)
