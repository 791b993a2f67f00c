"""Caches in FP8, INT8 or INT4: check their tensors, and dequantise them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..coded import HELD
from ..errors import KernelError
from ..fp8 import FP8
from ..int4 import PACKED, unpacked
from ..scales import scaled_up
from .checks import check_rank


def check_coded(
    op: str, q: Tensor, names: tuple[str, str], cache: tuple[Tensor, Tensor], rows: str, scales: Tensor
) -> None:
    """Check the latents (in FP8, INT8 or INT4), rope keys and scales of a cache against a query.

    Rope keys are in the query's dtype or, if G is 1, in the latents' FP8 or INT8 under the same scale. `names` names
    the latents and the rope keys in messages, `rows` the first two dims of the cache.
    Raises: KernelError.
    """
    latent, rope = cache
    check_rank(op, "latent_scales", scales, f"{rows} G")
    groups, columns = scales.shape[2], latent.shape[2]
    sizes = zip(scales.shape[:2], latent.shape[:2], strict=True)
    if any(size not in (1, full) for size, full in sizes) or groups < 1 or columns % groups:
        raise KernelError(
            f"mla::{op}: expected latent_scales that broadcasts to [{', '.join(rows.split())}, G] = "
            f"{[*latent.shape[:2], 'a divisor of ' + str(columns)]}, found {list(scales.shape)}"
        )
    rope_dtypes = (latent.dtype, q.dtype) if groups == 1 and latent.dtype != PACKED else (q.dtype,)
    expected = {names[0]: (latent, HELD), names[1]: (rope, rope_dtypes), "latent_scales": (scales, (torch.float32,))}
    for name, (tensor, dtypes) in expected.items():
        if tensor.dtype not in dtypes or tensor.device != q.device:
            raise KernelError(
                f"mla::{op}: expected {name}, with latent_scales given, of {' or '.join(map(str, dtypes))} on "
                f"{q.device}, found {tensor.dtype} on {tensor.device}"
            )


def bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for operations that do not support FP8, such as indexing."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def taken(tensor: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    """What `take` picks of a tensor's elements. It gets bytes for FP8."""
    return take(bytes_of(tensor)).view(FP8) if tensor.dtype == FP8 else take(tensor)


def rank_of(latent: Tensor, scales: Tensor | None) -> int:
    """`L`, the number of columns of latents: two in each element of INT4."""
    return latent.shape[-1] * 2 if is_packed(latent, scales) else latent.shape[-1]


def is_packed(latent: Tensor, scales: Tensor | None) -> bool:
    """Whether latents are in INT4."""
    return scales is not None and latent.dtype == PACKED


def dequantised(latent: Tensor, rope: Tensor, scales: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert latents and rope keys `[..., R]` to `dtype`: latents `[..., L]`.

    With scales `[..., G]` the latents are e4m3fn, int8, or bytes `[..., L / 2]` of INT4; rope keys of any other dtype
    have no scale. Without scales both may be of any dtype.
    """
    if scales is None:
        return latent.to(dtype), rope.to(dtype)
    numbers = rope.to(dtype) * scales.to(dtype) if rope.dtype in HELD else rope.to(dtype)
    return scaled_up(unpacked(latent) if is_packed(latent, scales) else latent, scales, dtype), numbers
