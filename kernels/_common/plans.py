"""Cache what a launcher works out from shapes, strides and dtypes, for the next call with the same ones.

The layers of a model make the same calls, and so do the steps of a decode over a cache that stays in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")


def layout(tensor: Tensor | None) -> Hashable:
    """Everything about a tensor that a plan may depend on, besides its device."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


class Plans(Generic[P]):
    """The plans of one launcher: at most `most`; the oldest is dropped to make room."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._known: dict[Hashable, P] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan for a key, made at the first call."""
        plan = self._known.get(key)
        if plan is None:
            plan = make()
            while len(self._known) >= self._most:
                self._known.pop(next(iter(self._known), None), None)
            self._known[key] = plan
        return plan
