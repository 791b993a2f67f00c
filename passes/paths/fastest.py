"""Which path the cost model takes at given sizes, and for which other sizes that holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import sympy

from mla_compile.cost import Decision, Device, Dims, Named, Size, Times, decide, times_of

from . import all as every
from .path import Path


def fastest(
    dims: Dims,
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: Mapping[sympy.Symbol, int] = MappingProxyType({}),
    *,
    named: Named | None = None,
    paths: Sequence[Path] | None = None,
) -> Decision:
    """The name of the path with the smallest roofline time, the first of `paths` on a tie, where symbols have their
    `hints`; see `decide`.

    `named` says which keys queries name; without `paths` all are compared.

    Raises:
        ValueError: where a symbol has no hint.
    """
    compared = [path for path in (every.PATHS if paths is None else paths) if path.competes(dims, named)]
    costs = {path.name: path.cost(dims, element_size, workspace_tokens, named) for path in compared}
    times = {name: times_of(cost, device) for name, cost in costs.items()}
    if any(sympy.fraction(sympy.together(size))[1] != 1 for size in (dims.Sq, dims.T)):  # a mean of B sequences
        times = {name: _in_all(pair, dims.B) for name, pair in times.items()}
    return decide(times, hints)


def _in_all(times: Times, sequences: Size) -> Times:
    """Times of all sequences from those of a mean one: polynomials, which compare in the same way."""
    first, second = (sympy.expand(sympy.cancel(time * sequences)) for time in times)
    return first, second
