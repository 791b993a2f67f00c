"""Sizes as torch has them, ints and SymInts, as those that the axis algebra has."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .axes import Size


def size_of(value: Any) -> Size:
    """An int, SymInt, or the graph node of one as a size."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        expression = sympy.sympify(value.node.expr).xreplace(_equal_symbols(value.node.shape_env))
        return int(expression) if isinstance(expression, sympy.Integer) else expression
    assert isinstance(value, int)
    return value


_EQUAL: WeakKeyDictionary[ShapeEnv, tuple[int, dict[sympy.Symbol, sympy.Expr]]] = WeakKeyDictionary()


def _equal_symbols(environment: ShapeEnv) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols that the guards so far equate with an expression, which torch does not always put in their place."""
    count, found = _EQUAL.get(environment, (0, {}))
    for guard in environment.guards[count:]:
        if isinstance(guard.expr, sympy.Eq):
            difference = sympy.expand(environment.replace(guard.expr.lhs - guard.expr.rhs).xreplace(found))
            for symbol in sorted(difference.free_symbols, key=str, reverse=True):
                factor = difference.coeff(symbol)
                solution = sympy.expand(symbol - difference / factor) if factor in (1, -1) else symbol
                if symbol not in solution.free_symbols:
                    found = {known: value.xreplace({symbol: solution}) for known, value in found.items()}
                    found[symbol] = solution
                    break
    _EQUAL[environment] = (len(environment.guards), found)
    return found


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The shape of a tensor node."""
    return tuple(size_of(size) for size in node.meta["val"].shape)


def hint_of(symbol: sympy.Symbol, environment: ShapeEnv) -> int:
    """The present value of a symbol of a shape environment."""
    ask = getattr(environment, "guarding_hint_or_throw", None) or environment.size_hint  # renamed in torch 2.12
    value: Any = ask(symbol)
    return int(value)
