"""The arguments of `mla::expanded_attention` and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...errors import KernelError
from ..attended import Attended
from ..checks import check_alike, check_mask, check_rank, check_shapes
from ..two_latents import check_ranks

OP = "expanded_attention"


class Expansion(Protocol):
    """The part shared by bundles whose keys are up-projected, wherever the keys are stored."""

    @property
    def q(self) -> Tensor: ...
    @property
    def w_uk(self) -> Tensor: ...
    @property
    def w_uv(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def scale(self) -> float: ...
    @property
    def workspace_tokens(self) -> int: ...


def head_widths(x: Expansion) -> tuple[int, int, int]:
    """`P, R, V`."""
    nope = x.w_uk.shape[1]
    return nope, x.q.shape[3] - nope, x.w_uv.shape[1]


@dataclass(frozen=True)
class ExpandedAttention:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    mask: Tensor | None
    causal_offset: int | None
    scale: float
    workspace_tokens: int
    kernels: str | None = None
    measure: bool = False

    @property
    def ropes(self) -> Tensor:
        """The rope keys, `[B, T, 1, R]` if all heads share them, `[B, T, N, R]` if each has its own."""
        return self.k_rope if self.k_rope.dim() == 4 else self.k_rope[:, :, None]

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        rope = "B T N R" if self.k_rope.dim() == 4 else "B T R"
        specs = {"q": "B Sq N P+R", "latent": "B T L", "k_rope": rope, "w_uk": "N P L", "w_uv": "N V L"}
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in specs}
        for name, spec in specs.items():
            check_rank(OP, name, tensors[name], spec)
        specs |= {"w_uk": "N P Lk", "w_uv": "N V Lv"}
        dims = dict(zip(("B", "Sq", "N"), self.q.shape, strict=False))
        dims |= {"T": self.latent.shape[1], "L": self.latent.shape[2], "R": self.k_rope.shape[-1]}
        dims |= {"P": self.w_uk.shape[1], "V": self.w_uv.shape[1], "P+R": self.w_uk.shape[1] + dims["R"]}
        dims |= check_ranks(OP, dims["L"], self.w_uk, self.w_uv)
        check_shapes(OP, dims, **{name: (tensors[name], spec) for name, spec in specs.items()})
        check_alike(OP, **tensors)
        check_mask(OP, self.mask, (dims["B"], dims["N"], dims["Sq"], dims["T"]), self.q.device)
        check_workspace(OP, self.workspace_tokens)


@dataclass(frozen=True)
class ExpandedAttentionBackward(Attended):
    """The arguments of the backward, which has both up-projections."""

    w_uk: Tensor
    w_uv: Tensor
    wanted: list[bool]

    def check(self) -> None:
        """Check shapes, dtypes and devices. Raises: KernelError."""
        operands = self.q, self.latent, self.k_rope, self.w_uk, self.w_uv, self.mask
        ExpandedAttention(*operands, self.causal_offset, self.scale, self.workspace_tokens).check()
        batch, query_count, heads, _ = self.q.shape
        dims = {"B": batch, "Sq": query_count, "N": heads, "V": self.w_uv.shape[1]}
        check_shapes(f"{OP}_backward", dims, grad_o=(self.grad_o, "B Sq N V"), o=(self.o, "B Sq N V"))


def check_workspace(op: str, workspace_tokens: int) -> None:
    """Check that the workspace holds at least one token. Raises: KernelError."""
    if workspace_tokens < 1:
        raise KernelError(f"mla::{op}: expected workspace_tokens of at least 1, found {workspace_tokens}")
