"""Sites whose fastest path depends on sizes that only a run knows: both paths, and the cost model's word on which.

For graphs that take no guards, those of exported programs. `torch.cond` takes one of the two, each right for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from mla_compile.cost import Times

from .materialize import Realize, realizer

BY_SIZE = "absorbed or chunked"
"""The path of such a site."""


@dataclass(frozen=True)
class BySize:
    """The roofline times of both paths, in torch's symbols."""

    absorbed: Times
    chunked: Times

    def absorbed_is_faster(self, realize: Realize) -> Tensor:
        """A bool scalar on CPU. In float64: products of all sizes may be more than an integer holds."""
        symbols = sorted({s for time in (*self.absorbed, *self.chunked) for s in time.free_symbols}, key=str)
        counts: list[Any] = [realize(symbol) for symbol in symbols]
        sizes = [torch.scalar_tensor(count, dtype=torch.float64) for count in counts]
        a, b = (
            torch.maximum(*(_evaluated(time, symbols, sizes) for time in times))
            for times in (self.absorbed, self.chunked)
        )
        return a <= b


def _evaluated(polynomial: sympy.Expr, symbols: Sequence[sympy.Symbol], sizes: Sequence[Tensor]) -> Tensor:
    total = torch.scalar_tensor(0.0, dtype=torch.float64)
    for powers, coefficient in sympy.Poly(polynomial, *symbols).terms():
        term = torch.scalar_tensor(float(coefficient), dtype=torch.float64)
        for size, power in zip(sizes, powers, strict=True):
            for _ in range(power):
                term = term * size
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
