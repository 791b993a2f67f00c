"""Numbers in few bits and their scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .terms import Read


@dataclass(frozen=True)
class Numbers:
    """Elements `of * by`, `of` in e4m3fn; `then` is what was done to the product after, as in a `Read`."""

    of: Read
    by: Read | None = None
    then: tuple[Any, ...] = ()

    @property
    def factor(self) -> float:
        """What the elements were multiplied with besides."""
        return math.prod(step for step in self.then if isinstance(step, float))
