"""How far from float64 a compiled result may be."""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 2.0
"""The compiled result may be this many times further from float64 than eager in the same dtype: another order of the
same sums has errors of the same size, not the same errors."""


def assert_as_close_as_eager(compiled: Tensor, eager: Tensor, exact: Tensor, factor: float = FACTOR) -> None:
    """Check the compiled result's distance to the exact (float64) one against eager's.

    The floor is one rounding of the largest value: eager may be exact by chance.
    """
    assert compiled.dtype == eager.dtype
    assert compiled.shape == eager.shape
    finite = eager.isfinite()
    assert torch.equal(finite, compiled.isfinite())
    error = (compiled.double() - exact).where(finite, 0).abs().max()
    allowed = (eager.double() - exact).where(finite, 0).abs().max()
    floor = torch.finfo(eager.dtype).eps * exact.where(finite, 0).abs().max()
    assert error <= factor * torch.maximum(allowed, floor), f"error {error:.3g}, eager's {allowed:.3g}"
