"""What a plan may ask of sizes that may be symbols, as in a graph that is compiled for all sizes.

A plan is right for every size, and chosen for the sizes with which the graph was traced.
"""

from __future__ import annotations

from typing import Any


def expected(size: int) -> int:
    """The size, or for a symbol its value when the graph was traced."""
    return size if isinstance(size, int) else int(_node(size).hint)


def is_expected(number: Any) -> bool:
    """Whether `expected` knows the number: a data-dependent symbol has no value before a graph runs."""
    return isinstance(number, int | float) or bool(_node(number).has_hint())


def always(condition: bool) -> bool:
    """Whether the condition holds for every value of its symbols. Adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_symbol(number: Any) -> bool:
    """Whether the number is still a symbol, which no guard has made a number."""
    return hasattr(number, "node") and _node(number).maybe_as_int() is None


def _node(symbol: Any) -> Any:
    return symbol.node
