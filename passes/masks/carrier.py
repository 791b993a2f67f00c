"""What the ways have in common in which an op can be told what a query sees: `Dense`, `Bounds` and `NamedKeys`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import sympy

from ..algebra.terms import Read


class Carrier(Protocol):
    """The keys that each query of a site attends to, as some op takes them.

    Each is made of all kinds of a meaning; where it cannot say one of them, there is none. All that its code depends on
    compares.
    """

    @property
    def reads(self) -> Sequence[Read]:
        """What its tensors are made of."""

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are no tensor's."""

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
