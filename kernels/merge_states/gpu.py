"""What CUDA and ROCm tensors get: the Triton kernel, which is imported at the first call. float64 is ATen's."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from .aten import check_arguments, merge_states_aten


def merge_states_gpu(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`mla::merge_states`; see `mla_compile.ops` for shapes, dtypes and errors."""
    if not suits(o_a) or o_a.shape[-1] == 0:
        return merge_states_aten(o_a, lse_a, o_b, lse_b)
    check_arguments(o_a, lse_a, o_b, lse_b)
    from .triton import merge_states_triton

    with torch.cuda.device(o_a.device):
        return merge_states_triton(o_a, lse_a, o_b, lse_b)


torch.library.impl("mla::merge_states", "CUDA")(merge_states_gpu)
