"""A kernel besides the op's own: where it is found, what it takes, and how it is called.

Of another project, or one of ours that has to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

B = TypeVar("B")
"""The bundle of an op's arguments."""

AUTO, OURS, GLUON = "auto", "triton", "gluon"
"""The values of `mla.kernels`."""


class Problem(Protocol):
    """What a call asks, as far as it may be refused: a frozen dataclass."""

    @property
    def rows(self) -> int:
        """Of queries and heads, that attend to the keys of a sequence."""

    def __hash__(self) -> int: ...


class Limits(Protocol):
    """What an implementation takes of the problems of its op."""

    def refusal(self, problem: Any) -> str | None:
        """Why it does not take a problem, after its name; None where it does."""


@dataclass(frozen=True)
class Function:
    """One that is called, and how: a signature that does not take this is another function than was read."""

    name: str
    arguments: tuple[str, ...] = ()
    """By name."""
    positional: int = 0
    """How many before them, whose names differ among versions."""


@dataclass(frozen=True, eq=False)
class Implementation(Generic[B]):
    """A row of the table."""

    name: str
    homes: tuple[str, ...]
    """Modules that have it, its authors' first."""
    functions: tuple[Function, ...]
    attend: Callable[[Any, B], tuple[Tensor, Tensor]]
    """o and lse as the op returns them, by a module and the arguments."""
    architectures: tuple[str, ...]
    limits: Limits
    first_on: tuple[str, ...] = ()
    """Architectures on which it is taken unmeasured, before ours, as its authors' figures there are known."""
    first_from: int = 1
    """Rows from which those figures are."""
    asked_by: str = AUTO
    """The value of `mla.kernels` under which it is looked at; another than `auto` of what has not run on a GPU yet."""

    def refusal(self, problem: Problem, arch: str) -> str | None:
        """Why it does not take a problem on an architecture; None where it does."""
        if arch not in self.architectures:
            return f"is for {' and '.join(self.architectures)}, this is {arch}"
        return self.limits.refusal(problem)

    def comes_first(self, problem: Problem, arch: str) -> bool:
        """Whether it is taken before ours where nothing is measured."""
        return arch in self.first_on and problem.rows >= self.first_from


@dataclass(frozen=True, eq=False)
class Op(Generic[B]):
    """An op that is computed by more than its own kernel."""

    name: str
    implementations: tuple[Implementation[B], ...]
    """In the order in which they are looked at."""
    problem_of: Callable[[B], Problem | None]
    """What a bundle asks; None where sizes are symbols."""
    layout_of: Callable[[B], Hashable]
    """All of a bundle that the problem and the time depend on."""
    sizes_of: Callable[[B], tuple[int, ...]]
    """Those that grow, which the problem leaves out."""
    small: Callable[[B], B]
    """A problem of the same kind for the trial."""

    def of(self, asked: str) -> tuple[Implementation[B], ...]:
        """Those that are looked at under a value of `mla.kernels`."""
        return tuple(each for each in self.implementations if each.asked_by == asked)
