"""Convert torch's sizes, ints and SymInts, to sizes of the axis algebra."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch
from sympy.core.function import Application
from torch import fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..algebra.sizes import Size, quotient, symbols_in


def size_of(value: Any) -> Size:
    """An int, a SymInt, or the graph node of one, as a size of the axis algebra."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        expression = _divided(_replaced(sympy.sympify(value.node.expr), _equal(value.node.shape_env)))
        return int(expression) if isinstance(expression, sympy.Integer) else expression
    assert isinstance(value, int)
    return value


@lru_cache(maxsize=1024)
def _divided(expression: sympy.Expr) -> sympy.Expr:
    """The expression without floors of exact quotients, such as `a**2 * b // a`, where one symbol is two sizes."""

    def exact(numerator: sympy.Expr, denominator: sympy.Expr) -> sympy.Expr:
        ratio = quotient(numerator, denominator)
        return FloorDiv(numerator, denominator) if ratio is None else sympy.sympify(ratio)

    return expression.replace(FloorDiv, exact) if expression.has(FloorDiv) else expression


_Equal: TypeAlias = dict[sympy.Expr, sympy.Expr]
_EQUAL: WeakKeyDictionary[ShapeEnv, tuple[tuple[int, int], _Equal]] = WeakKeyDictionary()
_PASSES = 4
"""How often what is put in the place of an expression may make another one that is known to be equal to something."""


def _equal(environment: ShapeEnv) -> _Equal:
    """Symbols that the guards so far or runtime asserts equate with an expression, which torch does not always
    substitute; and other expressions that they equate with a symbol or a number."""
    asserts = [check for checks in environment.deferred_runtime_asserts.values() for check in checks]
    count = len(environment.guards), len(asserts)
    known, found = _EQUAL.get(environment, ((0, 0), {}))
    if count == known:
        return found
    # Torch keeps asserts by the last of their symbols: the new ones may be anywhere.
    for expression in (*(guard.expr for guard in environment.guards[known[0] :]), *(check.expr for check in asserts)):
        for condition in sympy.And.make_args(expression):
            if isinstance(condition, sympy.Eq):
                found = _with_equation(condition, environment, found)
    _EQUAL[environment] = count, found
    return found


def _with_equation(equation: sympy.Eq, environment: ShapeEnv, found: _Equal) -> _Equal:
    """What is known with one more equation, solved for its last symbol whose factor is 1 or -1; if there is none, as
    in `a // 2 * 4 == 4`, for a quotient or another function of symbols; or for a side of it, as in `a // 2 * 2 == a`,
    if the other one is a symbol or a number."""
    left, right = (_replaced(environment.replace(side), found) for side in (equation.lhs, equation.rhs))
    difference = sympy.expand(left - right)
    for symbol in sorted(difference.free_symbols, key=str, reverse=True):
        factor = difference.coeff(symbol)
        solution = sympy.expand(symbol - difference / factor) if factor in (1, -1) else symbol
        if symbol not in solution.free_symbols:
            return _with(symbol, solution, found)
    for term in sympy.Add.make_args(difference):
        factor, function = term.as_coeff_Mul()
        other = quotient(term - difference, factor) if isinstance(function, Application) else None
        if other is not None and not sympy.sympify(other).has(function):
            return _with(function, sympy.sympify(other), found)
    for whole, of in ((left, right), (right, left)):
        if not whole.is_Atom and of.is_Atom:
            return _with(whole, of, found)
    return found


def _with(one: sympy.Expr, other: sympy.Expr, found: _Equal) -> _Equal:
    return {known: value.xreplace({one: other}) for known, value in found.items()} | {one: other}


def _replaced(expression: sympy.Expr, equal: _Equal) -> sympy.Expr:
    """The expression with what is known to be equal in the place of its parts."""
    for _ in range(_PASSES):
        before, expression = expression, expression.xreplace(equal)
        if expression == before:
            break
    return expression


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The shape of a tensor node."""
    return tuple(size_of(size) for size in node.meta["val"].shape)


def environment_of(node: fx.Node) -> ShapeEnv | None:
    """The environment of the symbols in a tensor node's shape; None if its tensor is none of torch's fakes."""
    mode = getattr(node.meta["val"], "fake_mode", None)
    environment: ShapeEnv | None = None if mode is None else mode.shape_env
    return environment


def unbacked_in(expression: Size | sympy.Basic) -> set[sympy.Symbol]:
    """The symbols that only a run knows: an element of a tensor (`.item()`), or how many elements were counted."""
    unbacked = SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT
    return {symbol for symbol in symbols_in(expression) if symbol_is_type(symbol, unbacked)}


def hint_of(symbol: sympy.Symbol, environment: ShapeEnv) -> int:
    """The present value of a symbol of a shape environment.

    A symbol that only a run knows counts as Inductor's `unbacked_symint_fallback`, clamped to the symbol's range.
    """
    if unbacked_in(symbol):
        bounds = environment.var_to_range[symbol]
        return int(min(max(sympy.Integer(inductor_config.unbacked_symint_fallback), bounds.lower), bounds.upper))
    ask = getattr(environment, "guarding_hint_or_throw", None) or environment.size_hint  # renamed in torch 2.12
    value: Any = ask(symbol)
    return int(value)


def hints_of(sizes: Iterable[Size], environment: ShapeEnv | None) -> dict[sympy.Symbol, int]:
    """The present values of all symbols of the sizes; empty without an environment: the sizes then have no symbols.

    If a size would not be positive (`T - u0`), the symbols that only a run knows are taken to be as small as they may
    be.
    """
    if environment is None:
        return {}
    known = [sympy.sympify(size) for size in sizes]
    hints = {symbol: hint_of(symbol, environment) for size in known for symbol in size.free_symbols}
    if any(size.subs(hints) < 1 for size in known):
        least = {symbol: environment.var_to_range[symbol].lower for symbol in hints if unbacked_in(symbol)}
        hints |= {symbol: int(max(bound, sympy.Integer(0))) for symbol, bound in least.items()}
    return hints
