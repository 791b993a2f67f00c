"""A pool whose latents are in FP8 (e4m3fn): 656 bytes a token and layer of DeepSeek, 1,152 in bfloat16.

Plain torch, and three tensors a layer rather than packed rows: each is written in place and read by itself, so that
compiled code has no views of other dtypes to see through, and attention gets the very tensors that the pool holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from ..fp8 import FP8, dequantised, groups_of, quantised, quantised_by
from .pool import PagePool


class FP8PagePool(PagePool):
    """A `PagePool` that quantises tokens as they are written; what is read is their numbers again, rounded to e4m3fn.

    Without `scale` it holds, for each layer, latents `[pages, page_size, L]` in e4m3fn (`layers`), their float32
    `scales` `[pages, page_size, G]`, one a token and group of 128 columns as `mla_compile.fp8` says, and rope keys
    `[pages, page_size, R]` of the tokens' dtype (`ropes`). With one, `layers` are `[pages, page_size, L + R]`, latents
    and rope keys over that scale, and what is greater than 448 times the scale becomes that.

    Args: as `PagePool`, dtype that of the tokens; scale, a number above 0, or a tensor of one for each layer.
    Raises: CacheMismatchError (a ValueError) for a size below its least, or another scale.
    """

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
        self._dtype = torch.get_default_dtype() if dtype is None else dtype
        self.scales: list[Tensor] = []
        self.ropes: list[Tensor] = []
        self.packed = scale is not None
        """Whether latents and rope keys are in one tensor, under one scale for all tokens."""
        super().__init__(layers, latent_width, rope_width, pages, page_size, dtype, device)
        if scale is not None:
            self.scales = _one_a_layer(scale, layers, self.device)

    def _empty(
        self, layers: int, pages: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> list[Tensor]:
        if self.packed:
            return super()._empty(layers, pages, width, FP8, device)
        self.scales = super()._empty(layers, pages, groups_of(self.latent_width), torch.float32, device)
        self.ropes = super()._empty(layers, pages, self.rope_width, dtype, device)
        return super()._empty(layers, pages, self.latent_width, FP8, device)

    @property
    def tensors(self) -> list[Tensor]:
        return self.layers if self.packed else [*self.layers, *self.scales, *self.ropes]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _put(self, layer: int, place: tuple[Tensor, ...], tokens: Tensor) -> None:
        if self.packed:
            self.layers[layer][place] = quantised_by(tokens, self.scales[layer])
            return
        latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
        self.layers[layer][place], self.scales[layer][place] = quantised(latent)
        self.ropes[layer][place] = k_rope

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        numbers = self.layers[layer].view(torch.uint8)[place].view(FP8)
        if self.packed:
            tokens = dequantised(numbers, self.scales[layer], self.dtype)
            latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
            return latent, k_rope
        return dequantised(numbers, self.scales[layer][place], self.dtype), self.ropes[layer][place]


def _one_a_layer(scale: float | Tensor, layers: int, device: torch.device) -> list[Tensor]:
    """A scale `[1]` in float32 for each layer."""
    known = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if known.dim() > 1 or known.numel() not in (1, layers) or not bool((known.isfinite() & (known > 0)).all()):
        raise CacheMismatchError(f"expected a scale above 0, or {layers}, one a layer, found {scale}")
    return [each.clone() for each in known.expand(layers)[:, None]]
