"""The implementation for CUDA and ROCm tensors: the Triton kernel, which is imported at the first call.

ATen operations take over for float64.
"""

from __future__ import annotations

import torch

from .._common.suits import suits
from ..bundles import checked, implement
from .arguments import AppendLatents
from .aten import append


def append_on_gpu(x: AppendLatents) -> None:
    """Write to `x.rows`."""
    if not suits(x.latent):
        return append(x)
    from .triton import append_latents_triton

    with torch.cuda.device(x.latent.device):
        return append_latents_triton(x)


append_latents_gpu = checked(AppendLatents, append_on_gpu)
implement("append_latents", "CUDA", append_latents_gpu)
