"""Pools whose latents take a byte per number or less, with scales beside them.

They are plain torch, with three tensors per layer rather than packed rows. Each tensor is written in place and read by
itself, so that the passes need not see through views as other dtypes, and attention gets the pool's tensors themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..scales import scaled_up
from .pool import PagePool


class CodedPagePool(PagePool, ABC):
    """A `PagePool` that quantises latents when they are written and dequantises them when they are read.

    It holds, for each layer, latents `[pages, page_size, code_width]` in `coded` (`layers`), their float32
    `scales` `[pages, page_size, G]`, and rope keys `[pages, page_size, R]` in the tokens' dtype (`ropes`).

    Args: as for `PagePool`, where dtype is that of the tokens.
    Raises: CacheMismatchError (a ValueError), as `PagePool`.
    """

    coded: ClassVar[torch.dtype]
    """The dtype of the tensors that store latents."""

    scales: list[Tensor]
    ropes: list[Tensor]

    @property
    def code_width(self) -> int:
        """How many elements of `coded` store a latent: `L`."""
        return self.latent_width

    @abstractmethod
    def groups(self) -> int:
        """`G`, the number of scales of a token."""

    @abstractmethod
    def quantised(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise latents: `[..., code_width]` in `coded`, and their scales `[..., G]`."""

    def _empty(
        self, layers: int, pages: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> list[Tensor]:
        self.scales = super()._empty(layers, pages, self.groups(), torch.float32, device)
        self.ropes = super()._empty(layers, pages, self.rope_width, dtype, device)
        return super()._empty(layers, pages, self.code_width, self.coded, device)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.layers, *self.scales, *self.ropes]

    def _put(self, layer: int, place: tuple[Tensor, ...], tokens: Tensor) -> None:
        latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
        self.layers[layer][place], self.scales[layer][place] = self.quantised(latent)
        self.ropes[layer][place] = k_rope

    def _get(self, layer: int, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        numbers = self._numbers(layer, place)
        return scaled_up(numbers, self.scales[layer][place], self.dtype), self.ropes[layer][place]

    def _numbers(self, layer: int, place: tuple[Tensor, ...]) -> Tensor:
        return self.layers[layer][place]
