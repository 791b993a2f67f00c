"""Find out in which dtypes torch has a library to multiply matrices on this CPU."""

from __future__ import annotations

import torch


def has_products(dtype: torch.dtype) -> bool:
    """Whether torch has a library on this CPU that multiplies this floating dtype as fast as float32. True if unknown.

    For half precision that is oneDNN, on CPUs with instructions for it. With AVX-512 but none for bfloat16, oneDNN
    widens in its inner loop, at a quarter of float32's rate. On other CPUs torch uses loops of its own, at a ninth of
    that rate, or at a hundredth where the elements of a column of the second matrix are not adjacent in memory, as in a
    contiguous one.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not _widens_bfloat16()


def _widens_bfloat16() -> bool:
    return torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
