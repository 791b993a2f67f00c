"""What CUDA and ROCm tensors get: the Triton kernel, which is imported at the first call.

ATen operations take over for float64 and for a cache whose rows are not dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from .aten import check_arguments, latent_attention_aten


def latent_attention_gpu(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`mla::latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    tensors = q_latent, q_rope, latent, k_rope, mask
    check_arguments(*tensors)
    if not suits(q_latent, latent, k_rope):
        return latent_attention_aten(*tensors, causal_offset, scale)
    from .._common.machine import present
    from .triton import latent_attention_triton

    with torch.cuda.device(q_latent.device):
        return latent_attention_triton(*tensors, causal_offset, scale, present(q_latent.device))


torch.library.impl("mla::latent_attention", "CUDA")(latent_attention_gpu)
