"""How far from float64 a compiled result may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FACTOR, FACTOR_OF_SUMS = 2.0, 4.0
"""The compiled result may be this many times further from float64 than eager in the same dtype. In half precision the
rounding of tensors decides, which both do alike (at most 1.2 in 39 comparisons, on a CPU with AVX512-BF16). In wider
dtypes that of sums does: another order of the same sums has errors of the same size, not the same errors, and those of
few rows are up to 3.5 times eager's from draw to draw, up to 2.7 where one draw was compared on another CPU."""


def assert_as_close_as_eager(compiled: Tensor, eager: Tensor, exact: Tensor, factor: float | None = None) -> None:
    """Check the compiled result's distance to the exact (float64) one against eager's.

    The floor is one rounding of the largest value: eager may be exact by chance.
    """
    if factor is None:
        factor = FACTOR if eager.dtype.itemsize < 4 else FACTOR_OF_SUMS
    assert compiled.dtype == eager.dtype
    assert compiled.shape == eager.shape
    finite = eager.isfinite()
    assert torch.equal(finite, compiled.isfinite())
    error = (compiled.double() - exact).where(finite, 0).abs().max()
    allowed = (eager.double() - exact).where(finite, 0).abs().max()
    floor = torch.finfo(eager.dtype).eps * exact.where(finite, 0).abs().max()
    assert error <= factor * torch.maximum(allowed, floor), f"error {error:.3g}, eager's {allowed:.3g}"


DRAWS = 16
"""How many inputs `assert_as_close_as_eager_on_average` wants.

Few rows share few rounding errors: of 8 queries over 40 keys the largest error in float32 is 0.3 to 3.5 times eager's
from draw to draw, while the root mean square over 16 draws is 0.9 to 1.7 times eager's (on a CPU with AVX2), so that
`FACTOR` bounds it in all dtypes.
"""


def assert_as_close_as_eager_on_average(
    compiled: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], factor: float = FACTOR
) -> None:
    """Check the root mean square of the errors of several draws against eager's: for results of few rows, whose largest
    error is a matter of chance. Takes no infinities."""
    assert len(compiled) == len(eager) == len(exact) >= DRAWS
    errors = {}
    for kind, results in (("compiled", compiled), ("eager", eager)):
        assert {result.dtype for result in results} == {eager[0].dtype}
        off = [result.double() - true for result, true in zip(results, exact, strict=True)]
        errors[kind] = torch.cat([each.flatten() for each in off]).square().mean().sqrt()
    floor = torch.finfo(eager[0].dtype).eps * torch.cat([true.flatten() for true in exact]).square().mean().sqrt()
    allowed = torch.maximum(errors["eager"], floor)
    assert errors["compiled"] <= factor * allowed, f"error {errors['compiled']:.3g}, eager's {errors['eager']:.3g}"
