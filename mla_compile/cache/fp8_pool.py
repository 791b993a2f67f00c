"""A pool of FP8 (e4m3fn) latents: 656 bytes per token and layer for DeepSeek, against 1,152 in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from ..fp8 import FP8, groups_of, quantised, quantised_by
from ..scales import scaled_up
from .coded_pool import CodedPagePool
from .pool import PagePool


class FP8PagePool(CodedPagePool):
    """A `PagePool` that quantises tokens when they are written and dequantises them when they are read.

    Without `scale` it holds, for each layer, latents `[pages, page_size, L]` in e4m3fn (`layers`), their float32
    `scales` `[pages, page_size, G]`, one per token and group of 128 columns (see `mla_compile.fp8`), and rope keys
    `[pages, page_size, R]` in the tokens' dtype (`ropes`). With a scale, `layers` are `[pages, page_size, L + R]`:
    latents and rope keys divided by it, clamped to magnitudes of at most 448.

    Args: as for `PagePool`, where dtype is that of the tokens; scale, a positive number, or a tensor with one per
    layer.
    Raises: CacheMismatchError (a ValueError), as `PagePool`, and for any other scale.
    """

    coded: ClassVar[torch.dtype] = FP8

    def __init__(
        self,
        layers: int,
        latent_width: int,
        rope_width: int,
        pages: int,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        scale: float | Tensor | None = None,
    ) -> None:
        self.packed = scale is not None
        """Whether latents and rope keys are in one tensor, with one scale for all tokens."""
        super().__init__(layers, latent_width, rope_width, pages, page_size, dtype, device)
        if scale is not None:
            self.scales, self.ropes = _one_a_layer(scale, layers, self.device), []

    def groups(self) -> int:
        """One per group of 128 columns (see `groups_of`)."""
        return groups_of(self.latent_width)

    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise latents by `mla_compile.fp8`."""
        return quantised(latent)

    def _empty(
        self, layers: int, pages: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> list[Tensor]:
        if self.packed:
            return PagePool._empty(self, layers, pages, width, FP8, device)
        return super()._empty(layers, pages, width, dtype, device)

    @property
    def tensors(self) -> list[Tensor]:
        return self.layers if self.packed else super().tensors

    def _put(self, layer: int, place: tuple[Tensor, ...], tokens: Tensor) -> None:
        if self.packed:
            self.layers[layer][place] = quantised_by(tokens, self.scales[layer])
        else:
            super()._put(layer, place, tokens)

    def _numbers(self, layer: int, place: tuple[Tensor, ...]) -> Tensor:
        # Not every device can index FP8, but all can index bytes.
        return self.layers[layer].view(torch.uint8)[place].view(FP8)

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if not self.packed:
            return super()._get(layer, place)
        tokens = scaled_up(self._numbers(layer, place), self.scales[layer], self.dtype)
        latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
        return latent, k_rope


def _one_a_layer(scale: float | Tensor, layers: int, device: torch.device) -> list[Tensor]:
    """A float32 scale `[1]` for each layer."""
    known = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if known.dim() > 1 or known.numel() not in (1, layers) or not bool((known.isfinite() & (known > 0)).all()):
        raise CacheMismatchError(f"expected a scale above 0, or {layers} of them, one for each layer, found {scale}")
    return [each.clone() for each in known.expand(layers)[:, None]]
