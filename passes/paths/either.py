"""Sites whose fastest path depends on sizes that only a run knows: two paths, between which the cost model decides.

This is for graphs that take no guards, those of exported programs. `torch.cond` takes one of the two; either is right
for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from mla_compile.cost import Times

from ..code.reading import Realize, realizer
from ..mla.site import Site
from .path import Code, Part
from .plan import Plan


@dataclass(frozen=True)
class Either:
    """Two plans for one site and their roofline times, in torch's symbols."""

    first: Plan
    second: Plan
    times: tuple[Times, Times]

    @property
    def word(self) -> str:
        """What reports call it."""
        return f"{self.first.word} or {self.second.word}"

    @property
    def words(self) -> str:
        """How each reads the keys, said once if both do so alike."""
        if self.first.words == self.second.words:
            return self.first.words
        return ", ".join(f"{plan.word} {plan.words}" for plan in (self.first, self.second) if plan.words)

    def as_taken(self, site: Site) -> Site:
        """The site: it is the same for both."""
        return site

    def parts(self, site: Site, workspace_tokens: int) -> list[Part]:
        """Both in the place of the attention."""
        (first,), (second,) = (plan.parts(site, workspace_tokens) for plan in (self.first, self.second))
        return [Part(site.node, EitherCode(first.code, second.code, self.times))]


class EitherCode:
    """The code of two plans, and which to take."""

    def __init__(self, first: Code, second: Code, times: tuple[Times, Times]) -> None:
        self.first, self.second, self.times = first, second, times
        self.sources = list(dict.fromkeys([*first.sources, *second.sources]))

    @property
    def said(self) -> object:
        """What the code of both depends on; their times follow from the sizes of the site."""
        return self.first.said, self.second.said

    def __call__(self, *values: Any) -> Tensor:
        def branch(code: Code) -> Callable[..., tuple[Tensor]]:
            places = [self.sources.index(source) for source in code.sources]
            return lambda *operands: (code(*(operands[place] for place in places)),)

        take_first = first_is_faster(*self.times, realizer(values))
        branches = branch(self.first), branch(self.second)
        (output,) = torch.ops.higher_order.cond(take_first, *branches, values)
        return output


def first_is_faster(first: Times, second: Times, realize: Realize) -> Tensor:
    """A bool scalar on CPU, true on a tie. Computed in float64, as products of all sizes may overflow an integer."""
    known: dict[sympy.Expr, Tensor] = {}

    def size(generator: sympy.Expr) -> Tensor:
        if generator not in known:
            count: Any = realize(generator)
            known[generator] = torch.scalar_tensor(count, dtype=torch.float64)
        return known[generator]

    a, b = (torch.maximum(*(_evaluated(time, size) for time in times)) for times in (first, second))
    return a <= b


def _evaluated(polynomial: sympy.Expr, size: Callable[[sympy.Expr], Tensor]) -> Tensor:
    """The value of a polynomial in symbols and functions of them, such as a maximum, each of which has a `size`."""
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
