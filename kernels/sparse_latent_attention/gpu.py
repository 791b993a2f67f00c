"""What CUDA and ROCm tensors get: the Triton kernel, which is imported at the first call.

ATen operations take over for float64 and for a cache whose rows are not dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from .aten import check_arguments, sparse_latent_attention_aten


def sparse_latent_attention_gpu(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    uniform_when_empty: bool,
    latent_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::sparse_latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    tensors = q_latent, q_rope, latent, k_rope, indices, mask
    check_arguments(*tensors, latent_scales)
    rest = causal_offset, scale, uniform_when_empty, latent_scales
    if not suits(q_latent, latent, k_rope):
        return sparse_latent_attention_aten(*tensors, *rest)
    from .._common.machine import present
    from .triton import sparse_latent_attention_triton

    with torch.cuda.device(q_latent.device):
        return sparse_latent_attention_triton(*tensors, *rest, present(q_latent.device))


torch.library.impl("mla::sparse_latent_attention", "CUDA")(sparse_latent_attention_gpu)
