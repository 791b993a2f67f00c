"""The arguments of `mla::sparse_latent_attention` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import KernelError
from ..checks import INTEGERS, check_alike, check_mask, check_rank, check_shapes
from ..coded import check_coded, is_packed

OP = "sparse_latent_attention"


@dataclass(frozen=True)
class SparseLatentAttention:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q_latent: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    indices: Tensor
    mask: Tensor | None
    causal_offset: int | None
    scale: float
    uniform_when_empty: bool
    latent_scales: Tensor | None = None

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        q_latent, q_rope, latent, k_rope, indices = self.q_latent, self.q_rope, self.latent, self.k_rope, self.indices
        check_rank(OP, "q_latent", q_latent, "B Sq N L")
        check_rank(OP, "q_rope", q_rope, "B Sq N R")
        check_rank(OP, "latent", latent, "B T L")
        check_rank(OP, "indices", indices, "B Sq topk")
        dims = dict(zip(("B", "Sq", "N", "L"), q_latent.shape, strict=True))
        dims |= {"T": latent.shape[1], "R": q_rope.shape[3], "topk": indices.shape[2], "L/2": dims["L"] // 2}
        columns = "L/2" if is_packed(latent, self.latent_scales) else "L"
        keys = {"latent": (latent, f"B T {columns}"), "k_rope": (k_rope, "B T R"), "indices": (indices, "B Sq topk")}
        check_shapes(OP, dims, q_rope=(q_rope, "B Sq N R"), **keys)
        check_alike(OP, q_latent=q_latent, q_rope=q_rope)
        if self.latent_scales is None:
            check_alike(OP, q_latent=q_latent, latent=latent, k_rope=k_rope)
        else:
            check_coded(OP, q_latent, ("latent", "k_rope"), (latent, k_rope), "B T", self.latent_scales)
        check_mask(OP, self.mask, (dims["B"], dims["N"], dims["Sq"], dims["T"]), q_latent.device)
        if indices.dtype not in INTEGERS or indices.device != q_latent.device:
            raise KernelError(
                f"mla::{OP}: expected indices of torch.int32 or torch.int64 on {q_latent.device}, "
                f"found {indices.dtype} on {indices.device}"
            )
