"""Manage buffers for tokens that are written in place and copied only when they are full."""

from __future__ import annotations

import torch
from torch import Tensor

from .inference_mode import is_locked, to_be_written


class Room:
    """The number of tokens that each layer holds, `length`, and has room for, `rows`.

    All layers share one `Room`, so that a compiled step has a single length. The first layer that asked for room leads:
    only its calls change the length, and the others write to the same rows.
    """

    def __init__(self, tokens: int) -> None:
        self.length, self.rows = 0, tokens + 1
        self._leads: int | None = None

    def extend(self, layer: int, count: int) -> None:
        """Make room for `count` more tokens of a layer."""
        if self._leads is None:
            self._leads = layer
        if layer == self._leads:
            self.length += count
            if self.length >= self.rows:  # never full, so that in all compiled code the tokens are a part of the buffer
                self.rows = 2 * self.length

    def crop(self, layer: int, count: int) -> None:
        """Forget the last `count` tokens of a layer."""
        if layer == self._leads:
            self.length = max(0, self.length - count)

    def put(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write `new` `[..., S, W]` as the last tokens to `buffer` `[..., rows, W]`, or to a copy if that is too small
        or has to stay as it is; return the buffer."""
        count = new.shape[-2]
        start = self.length - count
        if buffer is None or buffer.shape[-2] < self.rows or _stays(buffer):
            with to_be_written():
                other = new.new_empty(*new.shape[:-2], self.rows, new.shape[-1])
            if buffer is not None:
                other.narrow(-2, 0, start).copy_(buffer.narrow(-2, 0, start))
            buffer = other
        buffer.narrow(-2, start, count).copy_(new)
        return buffer

    def filled(self, buffer: Tensor | None) -> Tensor | None:
        """The tokens that a buffer holds."""
        return None if buffer is None else buffer.narrow(-2, 0, self.length)


def _stays(buffer: Tensor) -> bool:
    """Whether a buffer may not be written, as a backward may read it, or inference mode has locked it."""
    return torch.is_grad_enabled() or buffer.requires_grad or is_locked(buffer)
