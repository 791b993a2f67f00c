"""What a launcher works out of shapes, strides and dtypes, kept for the next call with the same.

A model's layers ask alike, and so does each step of a decode over a cache that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")


def layout(tensor: Tensor | None) -> Hashable:
    """All of a tensor that a plan may depend on, besides its device."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


class Plans(Generic[P]):
    """The plans of one launcher: at most `most`, of which the oldest makes room."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._known: dict[Hashable, P] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of a key, made at its first call."""
        plan = self._known.get(key)
        if plan is None:
            plan = make()
            while len(self._known) >= self._most:
                self._known.pop(next(iter(self._known), None), None)
            self._known[key] = plan
        return plan
