"""The summands of scores by kind, and the same over axes that they have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from ..algebra import operations
from ..algebra.terms import Dim, Form, Read
from .some_rows import in_rows
from .summands import Factor, Summand

T = TypeVar("T")


@dataclass(frozen=True)
class Sum:
    """The summands of scores, by kind; only the products where scores are more than a sum."""

    products: Sequence[Summand]
    masks: Sequence[Summand] = ()
    sinks: Sequence[Summand] = ()
    numbers: Sequence[float] = ()

    @property
    def factors(self) -> list[Factor]:
        """What multiplies the products, one product after the other."""
        return [factor for summand in self.products for factor in summand.factors]

    def in_rows(self, weights: Read, keys: int) -> Sum:
        """The same in those rows that a read of weights takes, whose keys are dimension `keys`."""
        groups = self.products, self.masks, self.sinks
        products, masks, sinks = ([in_rows(each, weights, keys) for each in group] for group in groups)
        return Sum(products, masks, sinks, self.numbers)

    def aligned(self, exposed: Form, dims: Sequence[Hashable], function: Sequence[Summand]) -> Aligned:
        """All of them, `exposed` (with labels `dims` for its dimensions) and a `function`'s forms, over common axes.

        Raises:
            Unaligned: if there are no such axes.
        """
        added = [replace(summand, form=form, added=()) for summand in self.products for form in summand.added]
        of_scores = self.products, self.masks, self.sinks
        groups: list[Sequence[Summand | Factor]] = [*of_scores, self.factors, added, function]
        operands = [operand for group in groups for operand in group]
        forms, axes = operations.align(
            [exposed, *(operand.form for operand in operands)], [dims, *(operand.labels for operand in operands)]
        )
        rest = iter(forms)

        def paired(group: Sequence[T]) -> list[tuple[Form, T]]:
            return list(zip(islice(rest, len(group)), group, strict=True))

        result, products, masks, sinks = next(rest), *map(paired, of_scores)
        factors, beside = iter(paired(self.factors)), iter([form for form, _ in paired(added)])
        each = [
            AlignedProduct(form, own, tuple(islice(factors, len(own.factors))), tuple(islice(beside, len(own.added))))
            for form, own in products
        ]
        return Aligned(axes, result, each, masks, sinks, list(rest))


@dataclass(frozen=True)
class AlignedProduct:
    """A product over common axes, what multiplies it, and what the op that computes it adds to it."""

    form: Form
    summand: Summand
    factors: tuple[tuple[Form, Factor], ...]
    added: tuple[Form, ...]


@dataclass(frozen=True)
class Aligned:
    """Forms over common axes: of the product with the values, of what scores are made of, and of a function of them."""

    axes: dict[Hashable, Dim]
    result: Form
    products: list[AlignedProduct]
    masks: list[tuple[Form, Summand]]
    sinks: list[tuple[Form, Summand]]
    function: list[Form]
    """In the order of the function's own forms."""
