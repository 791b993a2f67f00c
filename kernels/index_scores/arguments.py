"""The arguments of `mla::index_scores` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes

OP = "index_scores"


@dataclass(frozen=True)
class IndexScores:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q: Tensor
    k: Tensor
    weights: Tensor

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        q, k, weights = self.q, self.k, self.weights
        check_rank(OP, "q", q, "B Sq H D")
        check_rank(OP, "k", k, "B T D")
        check_rank(OP, "weights", weights, "B Sq H")
        batch, queries, heads, width = q.shape
        sizes = {"B": batch, "Sq": queries, "H": heads, "D": width, "T": k.shape[1]}
        check_shapes(OP, sizes, k=(k, "B T D"), weights=(weights, "B Sq H"))
        check_alike(OP, q=q, k=k)
        wide = torch.promote_types(q.dtype, torch.float32)
        if weights.dtype != wide or weights.device != q.device:
            raise KernelError(
                f"mla::{OP}: expected weights of {wide} on {q.device}, found {weights.dtype} on {weights.device}"
            )
