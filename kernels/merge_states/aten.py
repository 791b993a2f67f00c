"""Merging partial attentions out of ATen operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes


def merge_states_aten(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`mla::merge_states`; see `mla_compile.ops` for shapes, dtypes and errors.

    Moves from o_a towards o_b by b's share of the weight.
    """
    check_arguments(o_a, lse_a, o_b, lse_b)
    dtype = torch.promote_types(o_a.dtype, torch.float32)
    share = share_of_second(lse_a, lse_b).to(dtype)
    o = o_a.new_empty(o_a.shape).copy_(torch.lerp(o_a.to(dtype), o_b.to(dtype), share[..., None]))
    return o, torch.logaddexp(lse_a, lse_b)


def check_arguments(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    op = "merge_states"
    spec = " ".join(f"d{dim}" for dim in range(lse_a.dim()))
    check_rank(op, "o_a", o_a, f"{spec} V")
    dims = dict(zip(f"{spec} V".split(), o_a.shape, strict=True))
    check_shapes(op, dims, lse_a=(lse_a, spec), o_b=(o_b, f"{spec} V"), lse_b=(lse_b, spec))
    check_alike(op, o_a=o_a, o_b=o_b)
    check_alike(op, lse_a=lse_a, lse_b=lse_b)
    if lse_a.dtype != torch.float32:
        raise KernelError(f"mla::{op}: expected lse_a of torch.float32, found {lse_a.dtype}")


def share_of_second(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """`exp(lse_b - lse) = sigmoid(lse_b - lse_a)`, of the dtype and shape of both; 0 where neither has any weight."""
    return torch.sigmoid(lse_b - lse_a).masked_fill(lse_b == -torch.inf, 0.0)


torch.library.impl("mla::merge_states", "CompositeExplicitAutograd")(merge_states_aten)
