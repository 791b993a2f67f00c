"""The gradients on CUDA and ROCm devices: library products, and two Triton kernels or cuDNN's attention.

Triton is imported at the first call. ATen operations take over for float64, for gradients of a mask, for keys or values
that are the latent itself, and for heads that are too wide for a multiprocessor's shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from ..attended import Attended, Wanted
from .aten import attend_backward


def attend_backward_on_gpu(x: Attended) -> list[Tensor]:
    """The wanted gradients, each in the dtype of its operand."""
    if x.w_uk is None or x.w_uv is None or Wanted(*x.wanted).mask or not small(x.mask) or not suits(x.q):
        return attend_backward(x)
    from .._common.machine import present
    from ..implementations.choose import as_told
    from ..implementations.choose import attend as attend_by_the_best
    from ..implementations.table import GRADIENTS
    from .tiles import takes
    from .triton import attend_backward_triton

    with torch.cuda.device(x.q.device), as_told(x):
        machine = present(x.q.device)
        if not takes(machine, x.w_uk.shape[1], x.k_rope.shape[-1], x.w_uv.shape[1], x.q.itemsize):
            return attend_backward(x)
        return attend_by_the_best(GRADIENTS, x, machine, lambda problem: attend_backward_triton(problem, machine))
