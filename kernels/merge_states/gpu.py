"""The implementation for CUDA and ROCm tensors: the Triton kernel, which is imported at the first call.

ATen operations take over for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from ..bundles import checked, implement
from .arguments import MergeStates
from .aten import merge


def merge_on_gpu(x: MergeStates) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not suits(x.o_a) or x.o_a.shape[-1] == 0:
        return merge(x)
    from .triton import merge_states_triton

    with torch.cuda.device(x.o_a.device):
        return merge_states_triton(x)


merge_states_gpu = checked(MergeStates, merge_on_gpu)
implement("merge_states", "CUDA", merge_states_gpu)
