"""Try another project's kernel on a small problem, on which it has to agree with ours before it is used.

Signatures do not tell the base of a logarithm, where a causal limit ends, or whether what lies after the last key
counts. The problem is chosen to show such differences. It is computed once per kind of problem in a process, and waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._common.agreement import O_AND_LSE, difference
from .implementation import B


def normal_like(x: Tensor) -> Callable[..., Tensor]:
    """A function that makes tensors of normal numbers, like `x` in dtype and device, always from the same seed."""
    generator = torch.Generator(x.device).manual_seed(0)  # not the user's
    return lambda *shape: torch.randn(shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)


def disagreement(
    small: B,
    other: Callable[[B], Sequence[Tensor]],
    ours: Callable[[B], Sequence[Tensor]],
    names: Sequence[str] = O_AND_LSE,
) -> str | None:
    """How another implementation's results for a small problem differ from ours; None where they agree.

    Raises: torch.OutOfMemoryError.
    """
    expected = ours(small)
    try:
        results = other(small)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever another project raises
        return f"fails on a small problem: {type(error).__name__}: {error}"
    found = difference(results, expected, names)
    return None if found is None else f"{found} on a small problem"
