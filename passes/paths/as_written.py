"""The cost of the naive code, which is no path, and where that of the absorbed path crosses it."""

from __future__ import annotations

import sympy

from mla_compile.cost import Cost, Dims, Size, cost_of, pairs

from .absorbed import absorbed_cost

QUERIES = sympy.Symbol("Sq", positive=True)
"""The unknown of `crossover_queries`; its `T` may be written in terms of it."""


def expanded_cost(dims: Dims, element_size: int, *, causal: bool = False) -> Cost:
    """Cost of the naive code, which stores the keys `[B, N, T, P + R]` and values `[B, N, T, V]` of the whole cache."""
    d = dims
    keys_and_values = 2 * d.B * d.T * d.N * (d.P + d.R + d.V)
    elements = d.weights + d.latent_cache + d.query + d.output + keys_and_values
    return cost_of(expanded_multiply_adds(d, causal), elements, element_size)


def expanded_multiply_adds(dims: Dims, causal: bool) -> sympy.Expr:
    """The multiply-adds of up-projecting every key and attending to the results."""
    d = dims
    return d.B * d.N * (d.T * d.expanding + pairs(d, causal) * (d.P + d.R + d.V))


def crossover_queries(T: Size, L: Size, P: Size, V: Size) -> sympy.Expr | None:
    """Query tokens at which absorbing and expanding take equally many FLOPs; fewer favour absorbing.

    `T` is the key tokens in all: a number, a symbol, `sympy.oo`, or an expression in `QUERIES` where the context rather
    than the total is given (`QUERIES + 1000`; with no context `QUERIES`). None if they are nowhere equal, for instance
    with no context, where expanding always wins. `B`, `N` and `R` cancel.
    """
    total = sympy.Symbol("T", positive=True)
    dims = Dims(B=1, Sq=QUERIES, T=total, N=1, L=L, P=P, R=0, V=V)
    difference = absorbed_cost(dims, 1).flops - expanded_cost(dims, 1).flops
    if T is sympy.oo:
        solutions = [sympy.limit(s, total, sympy.oo) for s in sympy.solve(difference, QUERIES)]
    else:
        solutions = sympy.solve(difference.subs(total, T), QUERIES)
    possible = [s for s in solutions if s.is_positive is not False and s.is_finite is not False]
    return possible[0] if possible else None
