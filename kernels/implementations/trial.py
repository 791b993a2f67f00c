"""A small problem, on which another project's kernel has to agree with ours before it is trusted.

Signatures say nothing of the base of a logarithm, of where a causal limit ends, or of what lies behind the last key.
The problem has what would tell. It is computed once for each kind of problem in a process, and waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .implementation import B

_LSE = 2.0**-6
"""Sums of float32 are a thousand times nearer; a key too many of the shortest sequences changes it by 0.2."""
_ROUNDINGS = 4
"""Weights, sums and results are rounded to the queries' dtype, by each of the two."""


def normal_like(x: Tensor) -> Callable[..., Tensor]:
    """What makes tensors of normal numbers, of the dtype and on the device of `x`: the same ones each time."""
    generator = torch.Generator(x.device).manual_seed(0)  # not the user's
    return lambda *shape: torch.randn(shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)


def disagreement(
    small: B, other: Callable[[B], tuple[Tensor, Tensor]], ours: Callable[[B], tuple[Tensor, Tensor]]
) -> str | None:
    """What another implementation gives otherwise than ours for a small problem; None where they agree."""
    expected, expected_lse = ours(small)
    try:
        o, lse = other(small)
    except Exception as error:  # whatever another project raises
        return f"fails on a small problem: {type(error).__name__}: {error}"
    for name, result, like in (("o", o, expected), ("lse", lse, expected_lse)):
        if (result.shape, result.dtype) != (like.shape, like.dtype):
            return f"gives {name} of {list(result.shape)} {result.dtype}, expected {list(like.shape)} {like.dtype}"
    near = _ROUNDINGS * torch.finfo(expected.dtype).eps * expected.float().abs().max()
    if not bool(((o.float() - expected.float()).abs() <= near).all()):
        return "gives another o on a small problem than the Triton kernel"
    if not bool(((lse == expected_lse) | ((lse - expected_lse).abs() <= _LSE)).all()):
        return "gives another lse on a small problem than the Triton kernel"
    return None
