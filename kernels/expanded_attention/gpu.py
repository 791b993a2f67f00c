"""What CUDA and ROCm tensors get: library products and a Triton kernel, which is imported at the first call.

ATen operations take over for float64, for a cache whose rows are not dense, and for a mask whose elements are too far
apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from .aten import expanded_attention_aten
from .chunks import check_arguments


def expanded_attention_gpu(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    workspace_tokens: int,
) -> tuple[Tensor, Tensor]:
    """`mla::expanded_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    tensors = q, latent, k_rope, w_uk, w_uv, mask
    if not small(mask) or not suits(q, latent, k_rope):
        return expanded_attention_aten(*tensors, causal_offset, scale, workspace_tokens)
    check_arguments(*tensors, workspace_tokens)
    from .._common.machine import present
    from .triton import expanded_attention_triton

    with torch.cuda.device(q.device):
        return expanded_attention_triton(*tensors, causal_offset, scale, workspace_tokens, present(q.device))


torch.library.impl("mla::expanded_attention", "CUDA")(expanded_attention_gpu)
