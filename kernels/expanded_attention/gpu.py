"""The implementation for CUDA and ROCm tensors: library products and a Triton kernel, or cuDNN's attention.

Triton is imported at the first call. ATen operations take over for float64, for a cache whose rows are not dense, for
a mask whose elements are too far apart, and for heads that are too wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from ..bundles import checked, implement
from .arguments import ExpandedAttention, head_widths
from .aten import attend


def attend_on_gpu(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not small(x.mask) or not suits(x.q, x.latent, x.ropes.transpose(1, 2)):
        return attend(x)
    from .._common.machine import present
    from ..implementations.choose import as_told
    from ..implementations.choose import attend as attend_by_the_best
    from ..implementations.table import EXPANDED
    from .tiles import takes
    from .triton import expanded_attention_triton

    with torch.cuda.device(x.q.device), as_told(x):
        machine = present(x.q.device)
        if not takes(machine, *head_widths(x), x.q.itemsize):
            return attend(x)
        return attend_by_the_best(EXPANDED, x, machine, lambda problem: expanded_attention_triton(problem, machine))


expanded_attention_gpu = checked(ExpandedAttention, attend_on_gpu)
implement("expanded_attention", "CUDA", expanded_attention_gpu)
