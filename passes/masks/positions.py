"""An algebra on positions for the booleans and integers of a graph, which are compared, selected and scattered into
masks.

The value of a tensor's element is taken at an index whose entries are `Affine` in the axes of an attention. That of
an integer is `Affine` too, that of a bool a `Truth`, and that of a float a `Conditional` of two constants. A bool or
an integer that no rule covers is an element of its tensor.
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
    def never_positive(self) -> bool:
        """Whether it is provably at most 0 at all indices of its axes."""
        most = self.const
        for axis, factor in self.terms:
            if not isinstance(axis, Axis):
                return False
            if factor > 0:
                most = most + factor * (axis.size - 1)
        return known_at_most(most, 0)

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that it depends on."""
        own = frozenset(w for w, _ in self.terms if isinstance(w, Axis))
        return own.union(*(w.axes for w, _ in self.terms if isinstance(w, Read)))


class Literal(ABC):
    """A condition that holds or does not."""

    @abstractmethod
    def opposite(self) -> Literal:
        """The condition that holds exactly where this one does not."""

    @property
    def holds_always(self) -> bool:
        """Whether it provably holds at all indices."""
        return False


@dataclass(frozen=True)
class AtMost(Literal):
    """`what <= 0`"""

    what: Affine

    def opposite(self) -> AtMost:
        return AtMost(Affine(1) - self.what)

    @property
    def holds_always(self) -> bool:
        return self.what.never_positive


@dataclass(frozen=True)
class Element(Literal):
    """An element of a bool tensor, or its opposite."""

    read: Read
    inverted: bool = False

    def opposite(self) -> Element:
        return replace(self, inverted=not self.inverted)


@dataclass(frozen=True)
class Named(Literal):
    """The index along `key` is, or is not, among a tensor of indices, over which the tensor's axis `named` runs."""

    indices: Read
    named: Axis
    key: Axis
    extent: Size
    """Greater than any of the indices. Indices beyond the end of `key` name nothing."""
    distinct: bool
    """Whether provably no index occurs twice."""
    inverted: bool = False

    def opposite(self) -> Named:
        return replace(self, inverted=not self.inverted)


@dataclass(frozen=True)
class Truth:
    """All of the literals hold, or, if `negated`, not all of them do."""

    literals: tuple[Literal, ...] = ()
    negated: bool = False


def negation(truth: Truth) -> Truth:
    return replace(truth, negated=not truth.negated)


def _positive(truth: Truth) -> Truth | None:
    """The same without a negation; None if that would take a disjunction, or if it never holds."""
    if not truth.negated:
        return truth
    return Truth((truth.literals[0].opposite(),)) if len(truth.literals) == 1 else None


def conjunction(truths: Iterable[Truth]) -> Truth | None:
    """That all of them hold; None if that is not a conjunction of literals."""
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

    def settled(self) -> Conditional:
        """The same; as one number if the condition provably always holds, or never."""
        for condition, number in ((self.condition, self.then), (negation(self.condition), self.otherwise)):
            positive = _positive(condition)
            if positive is not None and all(literal.holds_always for literal in positive.literals):
                return constant(number)
        return self

    def where(self, test: Callable[[float], bool]) -> Truth:
        """Where the chosen number passes a test."""
        then, otherwise = test(self.then), test(self.otherwise)
        if then == otherwise:
            return ALWAYS if then else NEVER
        return self.condition if then else negation(self.condition)


Value: TypeAlias = Affine | Truth | Conditional
Index: TypeAlias = tuple[Affine, ...]


def constant(value: float) -> Conditional:
    return Conditional(ALWAYS, value, value)


def at(source: Hashable, shape: Sequence[Size], index: Sequence[Affine]) -> Read | None:
    """The element of a tensor at an index, as a read.

    None unless each entry is a number that is not negative, or one axis in steps of at least 1, starting at such a
    number; no axis may be in two entries.
    """
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
