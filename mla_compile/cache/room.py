"""Manage buffers for tokens that are written in place and copied only when they are full."""

from __future__ import annotations

import torch
from torch import SymBool, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import CacheMismatchError
from .inference_mode import is_locked, to_be_written


class Room:
    """The number of tokens that the layers hold, `length`, and have room for, `rows`.

    All layers share one `Room`, so that a compiled step has a single length. In each step every layer that takes part
    writes once, to the same rows. A layer that lacks some of the last tokens, because it has yet to write them or was
    cropped alone, has to write these before the next step.
    """

    def __init__(self, tokens: int) -> None:
        self.length, self.rows = 0, tokens + 1
        self._lacks: dict[int, int] = {}
        """How many of the last tokens each layer lacks that has written any."""

    def holds(self, layer: int) -> int:
        """The number of tokens of a layer."""
        return self.length - self._lacks.get(layer, self.length)

    def extend(self, layer: int, count: int) -> None:
        """Make room for `count` more tokens of a layer, which begin a step unless it lacks as many.

        Raises, with nothing changed: CacheMismatchError if it lacks another number of tokens, or another layer lacks
        some when a step begins.
        """
        lacking = self._lacks.get(layer, self.length)
        if lacking:
            if count != lacking:
                raise CacheMismatchError(f"expected the {lacking} tokens that layer {layer} lacks, found {count}")
        else:
            for other, others in self._lacks.items():
                if others:
                    raise CacheMismatchError(
                        f"expected tokens of layer {other} in each step, found that it lacks the last {others}: "
                        "after a step that did not end, reset the cache"
                    )
            self._lacks = dict.fromkeys(self._lacks, count)
            self.length += count
            if not _is_true(
                self.length < self.rows
            ):  # never full: in all compiled code tokens are a part of the buffer
                self.rows = 2 * self.length
        self._lacks[layer] = 0

    def crop(self, layer: int, count: int) -> None:
        """Forget the last `count` tokens of a layer, or all if it has fewer."""
        if layer in self._lacks:
            self._lacks[layer] += min(count, self.holds(layer))
            self._forget()

    def reset(self, layer: int) -> None:
        """Forget all tokens of a layer."""
        self._lacks.pop(layer, None)
        self._forget()

    def _forget(self) -> None:
        """Forget the tokens that every layer lacks."""
        none_has = min(self._lacks.values(), default=self.length)
        self.length -= none_has
        for layer in self._lacks:
            self._lacks[layer] -= none_has

    def put(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write `new` `[..., S, W]` as the last tokens to `buffer` `[..., rows, W]`, or to a copy if that is too small,
        of a dtype that does not hold them, or has to stay as it is; return the buffer."""
        count = new.shape[-2]
        start = self.length - count
        dtype = new.dtype if buffer is None else torch.promote_types(buffer.dtype, new.dtype)
        if buffer is None or not _is_true(buffer.shape[-2] >= self.rows) or buffer.dtype != dtype or _stays(buffer):
            with to_be_written():
                other = new.new_empty(*new.shape[:-2], self.rows, new.shape[-1], dtype=dtype)
            if buffer is not None:
                other.narrow(-2, 0, start).copy_(buffer.narrow(-2, 0, start))
            buffer = other
        buffer.narrow(-2, start, count).copy_(new)
        return buffer

    def filled(self, layer: int, buffer: Tensor | None) -> Tensor | None:
        """The tokens of a layer that a buffer holds."""
        return None if buffer is None else buffer.narrow(-2, 0, self.holds(layer))


def check_sizes(buffer: Tensor | None, new: Tensor) -> None:
    """Check that tokens `new` `[..., S, W]` have the sizes of those in a buffer `[..., rows, W]`, if there is one.

    Raises: CacheMismatchError if they do not.
    """
    if buffer is not None and (buffer.shape[:-2], buffer.shape[-1]) != (new.shape[:-2], new.shape[-1]):
        raise CacheMismatchError(
            f"expected tokens of shape {[*buffer.shape[:-2], 'S', buffer.shape[-1]]}, found {list(new.shape)}"
        )


def _is_true(condition: bool | SymBool) -> bool:
    """Whether a condition holds; in a program for export, which has no guards, whether it does for all of its sizes."""
    return statically_known_true(condition) if torch.compiler.is_exporting() else bool(condition)


def _stays(buffer: Tensor) -> bool:
    """Whether a buffer may not be written, as a backward may read it, or inference mode has locked it."""
    return torch.is_grad_enabled() or buffer.requires_grad or is_locked(buffer)
