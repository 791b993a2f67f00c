"""The arguments of `mla::latent_attention` and of its backward, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_alike, check_mask, check_rank, check_shapes

OP = "latent_attention"


@dataclass(frozen=True)
class LatentAttention:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q_latent: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    mask: Tensor | None
    causal_offset: int | None
    scale: float

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        q_latent, q_rope, latent, k_rope = self.q_latent, self.q_rope, self.latent, self.k_rope
        check_rank(OP, "q_latent", q_latent, "B Sq N L")
        check_rank(OP, "q_rope", q_rope, "B Sq N R")
        check_rank(OP, "latent", latent, "B T L")
        dims = dict(zip(("B", "Sq", "N", "L"), q_latent.shape, strict=True))
        dims |= {"T": latent.shape[1], "R": q_rope.shape[3]}
        check_shapes(OP, dims, q_rope=(q_rope, "B Sq N R"), latent=(latent, "B T L"), k_rope=(k_rope, "B T R"))
        check_alike(OP, q_latent=q_latent, q_rope=q_rope, latent=latent, k_rope=k_rope)
        check_mask(OP, self.mask, (dims["B"], dims["N"], dims["Sq"], dims["T"]), q_latent.device)


@dataclass(frozen=True)
class LatentAttentionBackward:
    """The arguments of the backward: the forward's operands and results, their gradients, and which are wanted."""

    grad_o: Tensor
    grad_lse: Tensor | None
    q_latent: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    mask: Tensor | None
    causal_offset: int | None
    scale: float
    o: Tensor
    lse: Tensor
    wanted: list[bool]

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        operands = self.q_latent, self.q_rope, self.latent, self.k_rope, self.mask
        LatentAttention(*operands, self.causal_offset, self.scale).check()
        dims = dict(zip(("B", "Sq", "N", "L"), self.q_latent.shape, strict=True))
        check_shapes(f"{OP}_backward", dims, grad_o=(self.grad_o, "B Sq N L"), o=(self.o, "B Sq N L"))
