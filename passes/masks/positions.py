"""Booleans and integers of a graph as algebra on positions: what is compared, selected and scattered into a mask.

A tensor's element is valued at an index whose entries are `Affine` in the axes of an attention: an integer is `Affine`
too, a bool a `Truth`, a float a `Conditional` of two constants. What follows no rule is an element of its tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..algebra.sizes import Size, known_at_most, same, total
from ..algebra.terms import Axis, Digit, Read


@dataclass(frozen=True)
class Affine:
    """`const + sum of factor * what`: an axis's index, or an element of an integer tensor."""

    const: Size = 0
    terms: tuple[tuple[Axis | Read, int], ...] = ()

    def __add__(self, other: Affine) -> Affine:
        factors: dict[Axis | Read, int] = dict(self.terms)
        for what, factor in other.terms:
            factors[what] = factors.get(what, 0) + factor
        return Affine(total([self.const, other.const]), tuple((w, f) for w, f in factors.items() if f))

    def __mul__(self, factor: int) -> Affine:
        return Affine(total([factor * self.const]), tuple((w, factor * f) for w, f in self.terms if factor))

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def factor(self, what: Axis | Read | None) -> int:
        return dict(self.terms).get(what, 0) if what is not None else 0

    @property
    def is_number(self) -> bool:
        """Whether it is one integer, and known."""
        return not self.terms and isinstance(self.const, int)

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that it depends on."""
        own = frozenset(w for w, _ in self.terms if isinstance(w, Axis))
        return own.union(*(w.axes for w, _ in self.terms if isinstance(w, Read)))


class Literal(ABC):
    """Something that holds or does not."""

    @abstractmethod
    def opposite(self) -> Literal:
        """What holds where this does not."""


@dataclass(frozen=True)
class AtMost(Literal):
    """`what <= 0`"""

    what: Affine

    def opposite(self) -> AtMost:
        return AtMost(Affine(1) - self.what)


@dataclass(frozen=True)
class Element(Literal):
    """An element of a bool tensor, or its opposite."""

    read: Read
    inverted: bool = False

    def opposite(self) -> Element:
        return replace(self, inverted=not self.inverted)


@dataclass(frozen=True)
class Named(Literal):
    """The index along `key` is among the elements of a tensor of indices along its axis `named`, or is not."""

    indices: Read
    named: Axis
    key: Axis
    extent: Size
    """More than any of the indices; those that are no index of `key` name nothing."""
    distinct: bool
    """Whether provably no index is there twice."""
    inverted: bool = False

    def opposite(self) -> Named:
        return replace(self, inverted=not self.inverted)


@dataclass(frozen=True)
class Truth:
    """All of the literals hold; `negated`: not all of them."""

    literals: tuple[Literal, ...] = ()
    negated: bool = False


def negation(truth: Truth) -> Truth:
    return replace(truth, negated=not truth.negated)


def _positive(truth: Truth) -> Truth | None:
    """The same without a negation; None where that would take a disjunction, or nothing can hold."""
    if not truth.negated:
        return truth
    return Truth((truth.literals[0].opposite(),)) if len(truth.literals) == 1 else None


def conjunction(truths: Iterable[Truth]) -> Truth | None:
    """All of them hold; None where that is no conjunction of literals."""
    literals: list[Literal] = []
    for truth in truths:
        if truth == NEVER:
            return NEVER
        positive = _positive(truth)
        if positive is None:
            return None
        literals += positive.literals
    return Truth(tuple(dict.fromkeys(literals)))


def disjunction(a: Truth, b: Truth) -> Truth | None:
    neither = conjunction([negation(a), negation(b)])
    return None if neither is None else negation(neither)


ALWAYS, NEVER = Truth(), Truth(negated=True)


@dataclass(frozen=True)
class Conditional:
    """`then` where the condition holds, else `otherwise`."""

    condition: Truth
    then: float
    otherwise: float

    def map(self, function: Callable[[float], float]) -> Conditional:
        return replace(self, then=function(self.then), otherwise=function(self.otherwise))

    def where(self, test: Callable[[float], bool]) -> Truth:
        """Where a test of the chosen number holds."""
        then, otherwise = test(self.then), test(self.otherwise)
        if then == otherwise:
            return ALWAYS if then else NEVER
        return self.condition if then else negation(self.condition)


Value: TypeAlias = Affine | Truth | Conditional
Index: TypeAlias = tuple[Affine, ...]


def constant(value: float) -> Conditional:
    return Conditional(ALWAYS, value, value)


def at(source: Hashable, shape: Sequence[Size], index: Sequence[Affine]) -> Read | None:
    """The element of a tensor at an index; None where an entry is not one axis, in steps, or a number from 0 on."""
    dims: list[tuple[Digit, ...]] = []
    seen: set[Axis] = set()
    for size, entry in zip(shape, index, strict=True):
        axes = [(what, factor) for what, factor in entry.terms if isinstance(what, Axis)]
        if same(size, 1):
            dims.append(())
        elif len(axes) != len(entry.terms) or len(axes) > 1 or not known_at_most(0, entry.const):
            return None
        elif not axes:
            dims.append((Digit(None, size, entry.const),))
        else:
            ((axis, step),) = axes
            if step < 1 or axis in seen:
                return None
            seen.add(axis)
            dims.append((Digit(axis, size, entry.const, step),))
    return Read(source, tuple(dims))
