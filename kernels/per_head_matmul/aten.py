"""One batched product over the heads, called and not generated.

Inductor turns a `bmm` of one row into loops on CPU, which for the one query of a decode step take ten times as long as
the library's product over the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ..checks import check_alike, check_rank, check_shapes


def per_head_matmul_aten(x: Tensor, weight: Tensor) -> Tensor:
    """`mla::per_head_matmul`; see `mla_compile.ops` for shapes, dtypes and errors."""
    check_arguments(x, weight)
    B, Sq, N, width = x.shape
    out = x.new_empty((B, Sq, N, weight.shape[2]))
    if B * Sq == 1:
        torch.bmm(x.view(N, 1, width), weight, out=out.view(N, 1, weight.shape[2]))
    else:
        by_row = torch.bmm(x.reshape(B * Sq, N, width).transpose(0, 1), weight).transpose(0, 1)
        out.view(by_row.shape).copy_(by_row)
    return out


def check_arguments(x: Tensor, weight: Tensor) -> None:
    op = "per_head_matmul"
    check_rank(op, "x", x, "B Sq N I")
    check_rank(op, "weight", weight, "N I O")
    _, _, heads, width = x.shape
    check_shapes(op, {"N": heads, "I": width, "O": weight.shape[2]}, weight=(weight, "N I O"))
    check_alike(op, x=x, weight=weight)


torch.library.impl("mla::per_head_matmul", "CompositeExplicitAutograd")(per_head_matmul_aten)
