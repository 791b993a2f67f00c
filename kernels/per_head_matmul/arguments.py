"""The arguments of `mla::per_head_matmul` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_alike, check_rank, check_shapes

OP = "per_head_matmul"


@dataclass(frozen=True)
class PerHeadMatmul:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    x: Tensor
    weight: Tensor

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        x, weight = self.x, self.weight
        check_rank(OP, "x", x, "B Sq N I")
        check_rank(OP, "weight", weight, "N I O")
        _, _, heads, width = x.shape
        check_shapes(OP, {"N": heads, "I": width, "O": weight.shape[2]}, weight=(weight, "N I O"))
        check_alike(OP, x=x, weight=weight)
