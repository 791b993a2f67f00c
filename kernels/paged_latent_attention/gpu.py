"""The implementation for CUDA and ROCm tensors: our Triton kernel, imported at the first call, or another project's.

ATen operations take over for float64, for pages whose rows are not dense, and for rows that are too wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from ..bundles import checked, implement
from .arguments import PagedLatentAttention
from .aten import attend


def attend_on_gpu(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not suits(x.q_latent, x.latent_pages, x.rope_pages):
        return attend(x)
    from .._common.machine import present
    from .._common.tiles import takes
    from ..implementations.choose import attend as attend_by_the_best
    from ..implementations.table import PAGED
    from .triton import paged_latent_attention_triton

    with torch.cuda.device(x.q_latent.device):
        machine = present(x.q_latent.device)
        if not takes(machine, x.q_latent.shape[-1], x.rope_pages.shape[-1], x.q_latent.itemsize):
            return attend(x)
        return attend_by_the_best(PAGED, x, machine, lambda problem: paged_latent_attention_triton(problem, machine))


paged_latent_attention_gpu = checked(PagedLatentAttention, attend_on_gpu)
implement("paged_latent_attention", "CUDA", paged_latent_attention_gpu)
