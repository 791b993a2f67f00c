"""The arguments of `mla::grow_cache` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import KernelError

OP = "grow_cache"


@dataclass(frozen=True)
class GrowCache:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    past: Tensor
    new: Tensor
    dim: int

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        past, new, dim = self.past, self.new, self.dim
        if not -past.dim() <= dim < past.dim():
            raise KernelError(f"mla::{OP}: expected a dimension of past {list(past.shape)}, found {dim}")
        others = [
            [size for place, size in enumerate(tensor.shape) if place != dim % past.dim()] for tensor in (past, new)
        ]
        if new.dim() != past.dim() or others[0] != others[1]:
            raise KernelError(
                f"mla::{OP}: expected new of past's sizes {list(past.shape)} but in dimension {dim}, "
                f"found {list(new.shape)}"
            )
        if new.dtype != past.dtype or new.device != past.device:
            raise KernelError(
                f"mla::{OP}: expected new of past's {past.dtype} on {past.device}, found {new.dtype} on {new.device}"
            )
