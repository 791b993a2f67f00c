"""Sites whose fastest path depends on sizes that only a run knows: both paths, and the cost model's word on which.

For graphs that take no guards, those of exported programs. `torch.cond` takes one of the two, each right for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from mla_compile.cost import Times

from ..code.reading import Realize, realizer

BY_SIZE = "absorbed or chunked"
"""The path of such a site."""


@dataclass(frozen=True)
class BySize:
    """The roofline times of both paths, in torch's symbols."""

    absorbed: Times
    chunked: Times

    def absorbed_is_faster(self, realize: Realize) -> Tensor:
        """A bool scalar on CPU. In float64: products of all sizes may be more than an integer holds."""
        known: dict[sympy.Expr, Tensor] = {}

        def size(generator: sympy.Expr) -> Tensor:
            if generator not in known:
                count: Any = realize(generator)
                known[generator] = torch.scalar_tensor(count, dtype=torch.float64)
            return known[generator]

        a, b = (torch.maximum(*(_evaluated(time, size) for time in times)) for times in (self.absorbed, self.chunked))
        return a <= b


def _evaluated(polynomial: sympy.Expr, size: Callable[[sympy.Expr], Tensor]) -> Tensor:
    """A polynomial in symbols, and in functions of them such as a maximum, each of which is a `size`."""
    total = torch.scalar_tensor(0.0, dtype=torch.float64)
    if polynomial.is_number:
        return total + float(polynomial)
    polynomial = sympy.Poly(polynomial)
    for powers, coefficient in polynomial.terms():
        term = torch.scalar_tensor(float(coefficient), dtype=torch.float64)
        for generator, power in zip(polynomial.gens, powers, strict=True):
            for _ in range(power):
                term = term * size(generator)
        total = total + term
    return total


class Emit(Protocol):
    """Torch code of a site, as a function of the tensors and sizes that it reads."""

    sources: list[fx.Node]

    def __call__(self, *values: Any) -> Tensor: ...


class EmitBySize:
    """The code of both paths, and which to take."""

    def __init__(self, absorbed: Emit, chunked: Emit, by_size: BySize) -> None:
        self.absorbed, self.chunked, self.by_size = absorbed, chunked, by_size
        self.sources = list(dict.fromkeys([*absorbed.sources, *chunked.sources]))

    def __call__(self, *values: Any) -> Tensor:
        def branch(emit: Emit) -> Callable[..., tuple[Tensor]]:
            places = [self.sources.index(source) for source in emit.sources]
            return lambda *operands: (emit(*(operands[place] for place in places)),)

        take_first = self.by_size.absorbed_is_faster(realizer(values))
        branches = branch(self.absorbed), branch(self.chunked)
        (output,) = torch.ops.higher_order.cond(take_first, *branches, values)
        return output
