"""Manage buffers for tokens that are written in place and copied only when they are full."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CacheMismatchError
from .inference_mode import is_locked, to_be_written


class Room:
    """The number of tokens that each of some layers holds, `length`, and has room for, `rows`.

    All layers share one `Room`, so that a compiled step has a single length. In each step every layer that takes part
    writes once, to the same rows; the first layer of all leads when tokens are forgotten.
    """

    def __init__(self, tokens: int) -> None:
        self.length, self.rows = 0, tokens + 1
        self._has_last: dict[int, bool] = {}
        """Whether a layer has written the tokens of the last step; the layer that leads comes first."""
        self._is_first = True
        """Whether the last step is the first one."""

    def extend(self, layer: int, count: int) -> None:
        """Make room for `count` more tokens of a layer, which begin a step if it has those of the last one.

        Raises: CacheMismatchError if another layer lacks tokens of the last step then, or this one those before.
        """
        has_last = self._has_last.get(layer)
        if has_last is None and not self._is_first:
            raise CacheMismatchError(f"expected tokens of layer {layer} from the first step on, found none before")
        if has_last or not self._has_last:
            for other, has in self._has_last.items():
                if not has:
                    raise CacheMismatchError(f"expected tokens of layer {other} in each step, found none in the last")
            self._is_first = not self._has_last
            self._has_last = dict.fromkeys(self._has_last, False)
            self.length += count
            if self.length >= self.rows:  # never full, so that in all compiled code the tokens are a part of the buffer
                self.rows = 2 * self.length
        self._has_last[layer] = True

    def crop(self, layer: int, count: int) -> None:
        """Forget the last `count` tokens of a layer."""
        if layer == next(iter(self._has_last), None):
            self.length = max(0, self.length - count)

    def reset(self, layer: int) -> None:
        """Forget all tokens of a layer."""
        self._has_last.pop(layer, None)
        if not self._has_last:
            self.length, self._is_first = 0, True

    def put(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write `new` `[..., S, W]` as the last tokens to `buffer` `[..., rows, W]`, or to a copy if that is too small
        or has to stay as it is; return the buffer. Raises: CacheMismatchError for other sizes than the buffer's."""
        if buffer is not None and (buffer.shape[:-2], buffer.shape[-1]) != (new.shape[:-2], new.shape[-1]):
            raise CacheMismatchError(
                f"expected tokens of shape {[*buffer.shape[:-2], 'S', buffer.shape[-1]]}, found {list(new.shape)}"
            )
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
