"""The implementation for CUDA and ROCm tensors: library products and Triton kernels, imported at the first call.

ATen operations take over for float64, for pages whose rows are not dense, and for a mask whose elements are too far
apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from ..bundles import checked, implement
from .arguments import PagedExpandedAttention
from .aten import attend


def attend_on_gpu(x: PagedExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not small(x.mask) or not suits(x.q, x.latent_pages, x.rope_pages):
        return attend(x)
    from .._common.machine import present
    from .triton import paged_expanded_attention_triton

    with torch.cuda.device(x.q.device):
        return paged_expanded_attention_triton(x, present(x.q.device))


paged_expanded_attention_gpu = checked(PagedExpandedAttention, attend_on_gpu)
implement("paged_expanded_attention", "CUDA", paged_expanded_attention_gpu)
