"""Sizes that may be symbols, as in a graph that is compiled for any of them: what a plan may ask of them.

A plan is right for every size, and chosen for those with which the graph was traced.
"""

from __future__ import annotations

from typing import Any


def expected(size: int) -> int:
    """The size, or of a symbol what it was when the graph was traced."""
    return size if isinstance(size, int) else int(_node(size).hint)


def is_expected(number: Any) -> bool:
    """Whether `expected` knows it: a symbol of data has no value before a graph runs."""
    return isinstance(number, int | float) or bool(_node(number).has_hint())


def always(condition: bool) -> bool:
    """Whether it holds for every value of the symbols in it; no guard is made."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_symbol(number: Any) -> bool:
    """Whether it is no number yet, not even by a guard."""
    return hasattr(number, "node") and _node(number).maybe_as_int() is None


def _node(symbol: Any) -> Any:
    return symbol.node
