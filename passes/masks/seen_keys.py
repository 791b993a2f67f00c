"""What carriers of masks have in common. A carrier tells an op what a query sees: `Dense`, `Bounds` or `NamedKeys`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import sympy

from ..algebra.terms import Read


class Carrier(Protocol):
    """The keys that each query of a site attends to, in the form that some op takes.

    A carrier is made of all kinds of a meaning; there is none if it cannot express one of them. Everything that its
    code depends on takes part in comparisons.
    """

    @property
    def reads(self) -> Sequence[Read]:
        """The reads that its tensors are made of."""

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are not sizes of a tensor."""

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
