"""Caches in FP8 or INT8: check their tensors, and dequantise them."""

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
    """Check the latents (in FP8 or INT8), rope keys and scales of a cache against a query.

    Rope keys are in the query's dtype or, if G is 1, in the latents' dtype under the same scale. `names` names the
    latents and the rope keys in messages, `rows` the first two dims of the cache.
    Raises: KernelError.
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
    """The same memory as bytes, for operations that do not support FP8, such as indexing."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def dequantised(latent: Tensor, rope: Tensor, scales: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert latents `[..., L]` and rope keys `[..., R]` to `dtype`.

    With scales `[..., G]` the latents are e4m3fn, its bytes, or int8; rope keys of any other dtype have no scale.
    Without scales both may be of any dtype.
    """
    if scales is None:
        return latent.to(dtype), rope.to(dtype)
    latent, rope = (t.view(FP8) if t.dtype == torch.uint8 else t for t in (latent, rope))
    numbers = rope.to(dtype) * scales.to(dtype) if rope.dtype in CODED else rope.to(dtype)
    return dequantised_latent(latent, scales, dtype), numbers
