"""The arguments of `mla::merge_states` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes

OP = "merge_states"


@dataclass(frozen=True)
class MergeStates:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    o_a: Tensor
    lse_a: Tensor
    o_b: Tensor
    lse_b: Tensor

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        o_a, lse_a, o_b, lse_b = self.o_a, self.lse_a, self.o_b, self.lse_b
        spec = " ".join(f"d{dim}" for dim in range(lse_a.dim()))
        check_rank(OP, "o_a", o_a, f"{spec} V")
        dims = dict(zip(f"{spec} V".split(), o_a.shape, strict=True))
        check_shapes(OP, dims, lse_a=(lse_a, spec), o_b=(o_b, f"{spec} V"), lse_b=(lse_b, spec))
        check_alike(OP, o_a=o_a, o_b=o_b)
        check_alike(OP, lse_a=lse_a, lse_b=lse_b)
        if lse_a.dtype != torch.float32:
            raise KernelError(f"mla::{OP}: expected lse_a of torch.float32, found {lse_a.dtype}")
