"""Try another project's kernel on a small problem, on which it has to agree with ours before it is used.

Signatures do not tell the base of a logarithm, where a causal limit ends, or whether what lies after the last key
counts. The problem is chosen to show such differences. It is computed once per kind of problem in a process, and waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .implementation import B

_LSE = 2.0**-6
"""The tolerance of lse. Sums in float32 are a thousand times closer; one key too many in the shortest sequences changes
it by 0.2."""
_ROUNDINGS = 4
"""The tolerance of o, in roundings to the queries' dtype: each of the two kernels rounds weights, sums and results."""


def normal_like(x: Tensor) -> Callable[..., Tensor]:
    """A function that makes tensors of normal numbers, like `x` in dtype and device, always from the same seed."""
    generator = torch.Generator(x.device).manual_seed(0)  # not the user's
    return lambda *shape: torch.randn(shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)


def disagreement(
    small: B, other: Callable[[B], tuple[Tensor, Tensor]], ours: Callable[[B], tuple[Tensor, Tensor]]
) -> str | None:
    """How another implementation's result for a small problem differs from ours; None where they agree."""
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
        return "gives another o than the Triton kernel on a small problem"
    if not bool(((lse == expected_lse) | ((lse - expected_lse).abs() <= _LSE)).all()):
        return "gives another lse than the Triton kernel on a small problem"
    return None
