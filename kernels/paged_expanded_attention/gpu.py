"""The implementation for CUDA and ROCm tensors: library products and Triton kernels, imported at the first call.

ATen operations take over for float64, for pages whose rows are not dense, for a mask whose elements are too far
apart, and for heads that are too wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from ..bundles import checked, implement
from ..expanded_attention.arguments import head_widths
from .arguments import PagedExpandedAttention
from .aten import attend


def attend_on_gpu(x: PagedExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if not small(x.mask) or not suits(x.q, x.latent_pages, x.rope_pages):
        return attend(x)
    from .._common.machine import present
    from ..expanded_attention.tiles import takes
    from .triton import paged_expanded_attention_triton

    with torch.cuda.device(x.q.device):
        machine = present(x.q.device)
        if not takes(machine, *head_widths(x), x.q.itemsize):
            return attend(x)
        return paged_expanded_attention_triton(x, machine)


paged_expanded_attention_gpu = checked(PagedExpandedAttention, attend_on_gpu)
implement("paged_expanded_attention", "CUDA", paged_expanded_attention_gpu)
