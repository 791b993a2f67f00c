"""How far from float64 an op may be."""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 3.0
"""An op's result may be this many times further from float64 than that of the plain equation in the same dtype.

Another order of the same sums gives a ratio of 1 on average; the greatest error of the few numbers of a small test
scatters around that. Where an op scales the query and not the scores, the measure is the `worse` of both ways: then the
ratio was at most 2.3 in 400 seeds of a case, with AVX2 and AVX-512 alike; with scaled scores alone it was up to 3.7.
"""


def worse(one: Tensor, other: Tensor, exact: Tensor) -> Tensor:
    """Of two results of the plain equation, computed in two orders, the one that is further from exact."""
    finite = exact.isfinite()
    distances = [(tensor.double() - exact).where(finite, 0).abs().max() for tensor in (one, other)]
    return one if distances[0] >= distances[1] else other


def assert_as_close_as(measure: Tensor, actual: Tensor, exact: Tensor, merges: int = 0) -> None:
    """Check that actual is at most FACTOR times as far from exact (float64) as measure, which has actual's dtype.

    The error of measure is counted as at least one rounding of the largest value, since measure may be exact by chance.
    `merges` is how often a running result was rounded to float32: each time allows half an eps more of the largest
    value, or of 1 for a weight.
    """
    assert measure.dtype == actual.dtype
    assert measure.shape == actual.shape
    finite = exact.isfinite()
    assert torch.equal(exact.where(~finite, 0), actual.double().where(~finite, 0))
    largest = exact.where(finite, 0).abs().max().item()
    error, unit = ((tensor.double() - exact).where(finite, 0).abs().max().item() for tensor in (actual, measure))
    allowed = FACTOR * max(unit, torch.finfo(actual.dtype).eps * largest)
    allowed += merges * torch.finfo(torch.float32).eps / 2 * max(largest, 1.0)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, the plain equation's {unit:.3g}"
