"""What CUDA and ROCm tensors get: the Triton kernel, which is imported at the first call.

ATen operations take over for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from .arguments import check_arguments
from .aten import append_latents_aten


def append_latents_gpu(
    latent: Tensor, k_rope: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None = None
) -> None:
    """`mla::append_latents`; see `mla_compile.ops` for shapes, dtypes and errors."""
    if not suits(latent):
        return append_latents_aten(latent, k_rope, slots, rows, scale)
    check_arguments(latent, k_rope, slots, rows, scale)
    from .triton import append_latents_triton

    with torch.cuda.device(latent.device):
        return append_latents_triton(latent, k_rope, slots, rows, scale)


torch.library.impl("mla::append_latents", "CUDA")(append_latents_gpu)
