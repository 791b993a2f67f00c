"""Merging partial attentions with ATen operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..dispatcher import general
from .arguments import MergeStates


def merge(x: MergeStates) -> tuple[Tensor, Tensor]:
    """o and lse: interpolates from o_a towards o_b by b's share of the weight."""
    dtype = torch.promote_types(x.o_a.dtype, torch.float32)
    share = share_of_second(x.lse_a, x.lse_b).to(dtype)
    o = x.o_a.new_empty(x.o_a.shape).copy_(torch.lerp(x.o_a.to(dtype), x.o_b.to(dtype), share[..., None]))
    return o, torch.logaddexp(x.lse_a, x.lse_b)


def share_of_second(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """`exp(lse_b - lse) = sigmoid(lse_b - lse_a)`, in the dtype and shape of both; 0 where b has no weight."""
    return torch.sigmoid(lse_b - lse_a).masked_fill(lse_b == -torch.inf, 0.0)


merge_states_aten = checked(MergeStates, merge)
implement("merge_states", "CompositeExplicitAutograd", merge_states_aten)
general("merge_states")(merge_states_aten)
