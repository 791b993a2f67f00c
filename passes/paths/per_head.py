"""Multiply with a matrix for each head: by an op, or by a loop that Inductor generates."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..algebra.terms import Read


def per_head(x: Tensor, weight: Tensor, read: Read | None) -> Tensor:
    """`x` `[B, Sq, N, I]` times `weight` `[N, I, O]`; `read` says where the weight comes from.

    A weight that is made from an input, by a cast or by dequantising, would have to be written for the op and read
    again. For one row it is therefore multiplied where it is made: Inductor's loop reads it in the few bits in which it
    is kept. Factors of two dtypes are promoted, as users do who keep scores or attention weights in float32.
    """
    sizes = x.shape[0], x.shape[1]
    result = torch.promote_types(x.dtype, weight.dtype)
    made = weight.dtype != result or (read is not None and _is_made(read))
    if made and all(isinstance(size, int) and size == 1 for size in sizes):
        dtype = torch.promote_types(result, torch.float32)
        return (x.to(dtype).unsqueeze(-1) * weight.to(dtype)).sum(-2).to(result)
    out: Tensor = torch.ops.mla.per_head_matmul(x.to(result), weight.to(result))
    return out


def _is_made(read: Read) -> bool:
    return bool(read.then) or not isinstance(read.source, fx.Node) or read.source.op == "call_function"
