"""Find out in which dtypes torch has a library to multiply matrices on this CPU."""

from __future__ import annotations

import torch


def has_products(dtype: torch.dtype) -> bool:
    """Whether torch uses a library to multiply matrices of this floating dtype on this CPU. True if unknown.

    For half precision that is oneDNN, on CPUs with instructions for it (or for widening it: AVX-512 suffices for
    bfloat16). On other CPUs torch uses loops of its own, at a ninth of float32's rate, or at a hundredth where the
    elements of a column of the second matrix are not adjacent in memory, as in a contiguous one.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return True
    supported = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, supported)())
