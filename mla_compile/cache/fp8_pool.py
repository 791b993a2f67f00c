"""A pool whose latents are in FP8 (e4m3fn): 656 bytes a token and layer of DeepSeek, 1,152 in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..coded import dequantised
from ..errors import CacheMismatchError
from ..fp8 import FP8, groups_of, quantised, quantised_by
from .coded_pool import CodedPagePool
from .pool import PagePool


class FP8PagePool(CodedPagePool):
    """A `PagePool` that quantises tokens as they are written; what is read is their numbers again, rounded to e4m3fn.

    Without `scale` it holds, for each layer, latents `[pages, page_size, L]` in e4m3fn (`layers`), their float32
    `scales` `[pages, page_size, G]`, one a token and group of 128 columns as `mla_compile.fp8` says, and rope keys
    `[pages, page_size, R]` of the tokens' dtype (`ropes`). With one, `layers` are `[pages, page_size, L + R]`, latents
    and rope keys over that scale, and what is greater than 448 times the scale becomes that.

    Args: as `PagePool`, dtype that of the tokens; scale, a number above 0, or a tensor of one for each layer.
    Raises: CacheMismatchError (a ValueError) for a size below its least, or another scale.
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
        """Whether latents and rope keys are in one tensor, under one scale for all tokens."""
        super().__init__(layers, latent_width, rope_width, pages, page_size, dtype, device)
        if scale is not None:
            self.scales, self.ropes = _one_a_layer(scale, layers, self.device), []

    def groups(self) -> int:
        """One a group of 128 columns."""
        return groups_of(self.latent_width)

    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """As `mla_compile.fp8` says."""
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
        return self.layers[layer].view(torch.uint8)[place].view(FP8)  # not every device indexes FP8: bytes do

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if not self.packed:
            return super()._get(layer, place)
        tokens = dequantised(self._numbers(layer, place), self.scales[layer], self.dtype)
        latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
        return latent, k_rope


def _one_a_layer(scale: float | Tensor, layers: int, device: torch.device) -> list[Tensor]:
    """A scale `[1]` in float32 for each layer."""
    known = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if known.dim() > 1 or known.numel() not in (1, layers) or not bool((known.isfinite() & (known > 0)).all()):
        raise CacheMismatchError(f"expected a scale above 0, or {layers}, one a layer, found {scale}")
    return [each.clone() for each in known.expand(layers)[:, None]]
