"""What torch multiplies on this CPU in which dtype."""

from __future__ import annotations

import torch


def has_products(dtype: torch.dtype) -> bool:
    """Whether a library of torch's multiplies matrices of this floating dtype on CPU.

    Half precision is oneDNN's, on CPUs with instructions for it (or for widening it: AVX-512 does for bfloat16).
    Elsewhere torch has loops of its own, of a ninth of float32's rate or, where columns of the second matrix do not lie
    side by side, of a hundredth. True where that cannot be known.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return True
    supported = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, supported)())
