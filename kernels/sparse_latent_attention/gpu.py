"""The implementation for CUDA and ROCm tensors: a Triton kernel or one in Gluon, imported at the first call.

ATen operations take over for float64, for a cache whose rows are not dense, and for rows that are too wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from ..bundles import checked, implement
from .arguments import SparseLatentAttention
from .aten import attend


def attend_on_gpu(x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not suits(x.q_latent, x.latent, x.k_rope):
        return attend(x)
    from .._common.machine import present
    from .._common.tiles import takes
    from ..implementations.choose import attend as attend_by_the_best
    from ..implementations.table import NAMED
    from .triton import sparse_latent_attention_triton

    with torch.cuda.device(x.q_latent.device):
        machine = present(x.q_latent.device)
        if not takes(machine, x.q_latent.shape[-1], x.k_rope.shape[-1], x.q_latent.itemsize):
            return attend(x)
        return attend_by_the_best(NAMED, x, machine, lambda problem: sparse_latent_attention_triton(problem, machine))


sparse_latent_attention_gpu = checked(SparseLatentAttention, attend_on_gpu)
implement("sparse_latent_attention", "CUDA", sparse_latent_attention_gpu)
