"""What a query sees, as an op can be told: `Dense`, `Bounds`, `NamedKeys`, `Sequences` or `OfRank`, and what these have
in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import sympy

from ..algebra.terms import Read


class SeenKeys(Protocol):
    """The keys that each query of a site attends to, in the form that some op takes.

    They are made of all kinds of a meaning; there are none if these cannot express one of them. Everything that their
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
