"""Sizes: ints, or sympy expressions over integer symbols, and what is known of them for every value of the symbols."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr


class Unaligned(Exception):
    """Sizes do not factor over one another, so that the axes cannot be told apart."""


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def known_at_most(a: Size, b: Size) -> bool:
    """Whether `a <= b` provably holds for every value of their symbols. All tests of a sign go through this."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(sympy.sympify(b) - sympy.sympify(a)).is_nonnegative)


def symbols_in(*sizes: Size) -> set[sympy.Symbol]:
    """The symbols that occur in the sizes."""
    return set[sympy.Symbol]().union(*(sympy.sympify(size).free_symbols for size in sizes))


def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` where `b` divides `a` for every value of their symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b != 0 and a % b == 0 else None
    if a == b:
        return 1
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = sympy.fraction(ratio)
    if denominator != 1 or not ratio.is_integer:
        return None
    return int(numerator) if numerator.is_Integer else numerator


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 for none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total if isinstance(total, int) else sympy.expand(total)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of sizes."""
    result: Size = 0
    for size in sizes:
        result = result + size
    if isinstance(result, int):
        return result
    result = sympy.expand(result)
    return int(result) if result.is_Integer else result
