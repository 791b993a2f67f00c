"""An attention, and which gradients of it are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Attended:
    """An attention and the gradients of its results: see `mla::expanded_attention_backward`.

    If `w_uk` or `w_uv` is None, the keys or values are the latent itself, and P or V is L. The rope keys may be those
    of each head, `[B, T, N, R]`, and the latent may be two (`latents_of`).
    """

    grad_o: Tensor
    grad_lse: Tensor | None
    q: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor | None
    w_uv: Tensor | None
    mask: Tensor | None
    causal_offset: int | None
    scale: float
    workspace_tokens: int
    o: Tensor
    lse: Tensor
    wanted: Sequence[bool]
    kernels: str | None = None
    measure: bool = False

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient, in the order of `wanted`."""
        return self.q, self.latent, self.k_rope, self.w_uk, self.w_uv, self.mask


@dataclass(frozen=True)
class Wanted:
    """Which gradients are wanted."""

    q: bool
    latent: bool
    k_rope: bool
    w_uk: bool
    w_uv: bool
    mask: bool
