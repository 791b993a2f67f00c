"""Say how two results of one attention, or gradients, differ, where both are computed in the queries' dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

O_AND_LSE = ("o", "lse")
"""The names of an attention's results."""

_LSE = 2.0**-6
"""The tolerance of lse. Sums in float32 are a thousand times closer; one key too many in the shortest sequences changes
it by 0.2."""
_ROUNDINGS = 4
"""The tolerance of all others, in roundings to the queries' dtype: each of the two kernels rounds weights, sums and
results."""
_LEAST = 2.0**-12
"""The least of these tolerances, relative to the largest element: in float32, sums in another order differ by more than
a few roundings."""


def difference(result: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str] = O_AND_LSE) -> str | None:
    """How results of these names differ from those expected, as the end of a sentence; None where they agree.

    Waits for the device.
    """
    for name, found, like in zip(names, result, expected, strict=True):
        if (found.shape, found.dtype) != (like.shape, like.dtype):
            return f"gives {name} of {list(found.shape)} {found.dtype}, expected {list(like.shape)} {like.dtype}"
        a, b = found.float(), like.float()
        largest = b.abs().where(b.isfinite(), 0).max()
        near = _LSE if name == "lse" else max(_ROUNDINGS * torch.finfo(like.dtype).eps, _LEAST) * largest
        if not bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= near)).all()):
            return f"gives another {name} than expected"
    return None
