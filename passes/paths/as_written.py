"""The cost of the naive code, which is no path."""

from __future__ import annotations

import sympy

from mla_compile.cost import Cost, Dims, cost_of, pairs


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
