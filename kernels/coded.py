"""Caches in FP8 or INT8: what their tensors must be, and their numbers again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..coded import CODED
from ..coded import dequantised as dequantised_latent
from ..errors import KernelError
from ..fp8 import FP8
from .checks import check_rank


def check_coded(
    op: str, q: Tensor, names: tuple[str, str], cache: tuple[Tensor, Tensor], rows: str, scales: Tensor
) -> None:
    """Check latents and rope keys, `names` of them, the first in FP8 or INT8, and their scales against a query.

    Rope keys are in the query's dtype or, under the same scale, in the latents'. `rows` says what the first two dims
    of the cache are called. Raises: KernelError.
    """
    latent, rope = cache
    check_rank(op, "latent_scales", scales, f"{rows} G")
    groups, rank = scales.shape[2], latent.shape[2]
    sizes = zip(scales.shape[:2], latent.shape[:2], strict=True)
    if any(size not in (1, full) for size, full in sizes) or groups < 1 or rank % groups:
        raise KernelError(
            f"mla::{op}: expected latent_scales that broadcasts to [{', '.join(rows.split())}, G] = "
            f"{[*latent.shape[:2], 'a divisor of ' + str(rank)]}, found {list(scales.shape)}"
        )
    rope_dtypes = (latent.dtype, q.dtype) if groups == 1 else (q.dtype,)
    expected = {names[0]: (latent, CODED), names[1]: (rope, rope_dtypes), "latent_scales": (scales, (torch.float32,))}
    for name, (tensor, dtypes) in expected.items():
        if tensor.dtype not in dtypes or tensor.device != q.device:
            raise KernelError(
                f"mla::{op}: expected {name}, with latent_scales given, of {' or '.join(map(str, dtypes))} on "
                f"{q.device}, found {tensor.dtype} on {tensor.device}"
            )


def bytes_of(tensor: Tensor) -> Tensor:
    """The same memory for what does not know FP8, indexing say."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def dequantised(latent: Tensor, rope: Tensor, scales: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents `[..., L]` and rope keys `[..., R]` in `dtype`, of e4m3fn or its bytes or of int8, and scales `[..., G]`;
    without scales of any dtype.

    Rope keys of any other dtype have no scale.
    """
    if scales is None:
        return latent.to(dtype), rope.to(dtype)
    latent, rope = (t.view(FP8) if t.dtype == torch.uint8 else t for t in (latent, rope))
    numbers = rope.to(dtype) * scales.to(dtype) if rope.dtype in CODED else rope.to(dtype)
    return dequantised_latent(latent, scales, dtype), numbers
