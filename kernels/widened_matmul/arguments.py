"""The arguments of `mla::widened_matmul` and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import KernelError
from ..checks import INTEGERS, check_alike, check_rank, check_shapes

OP = "widened_matmul"


@dataclass(frozen=True)
class WidenedMatmul:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    x: Tensor
    weight: Tensor
    ends: Tensor | None = None

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        x, weight, ends = self.x, self.weight, self.ends
        spec = "K M" if ends is None else "E K M"
        check_rank(OP, "x", x, "S K")
        check_rank(OP, "weight", weight, spec)
        dims = {"E": weight.shape[0], "K": x.shape[1], "M": weight.shape[-1]}
        check_shapes(OP, dims, weight=(weight, spec))
        check_alike(OP, x=x, weight=weight)
        if ends is None:
            return
        check_rank(OP, "ends", ends, "E")
        check_shapes(OP, dims, ends=(ends, "E"))
        if ends.dtype not in INTEGERS or ends.device != x.device:
            raise KernelError(
                f"mla::{OP}: expected ends in int32 or int64 on {x.device}, found {ends.dtype} on {ends.device}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def groups(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of x of each group that is not empty, and the group's weight `[K, M]`. Reads the ends.

        Raises: KernelError, if the ends do not ascend within the rows.
        """
        rows = self.x.shape[0]
        if self.ends is None:
            yield slice(0, rows), self.weight
            return
        start = 0
        for group, end in enumerate(self.ends.tolist()):
            if not start <= end <= rows:
                raise KernelError(f"mla::{OP}: expected ends that ascend to at most {rows}, found {end} after {start}")
            if start < end:
                yield slice(start, end), self.weight[group]
            start = end
