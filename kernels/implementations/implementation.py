"""Describe an alternative to an op's own kernel: where it is found, what it takes, and how it is called.

It is another project's, or one of ours that does not take every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ...asked import AUTO
from .._common.agreement import O_AND_LSE

B = TypeVar("B")
"""The bundle of an op's arguments."""


class Problem(Protocol):
    """Everything about a call that may be a reason to refuse it: a frozen dataclass."""

    @property
    def rows(self) -> int:
        """What `first_from` is compared with: over pages, the queries and heads that attend to a sequence's keys; for a
        prompt, at least how many queries there are."""

    def __hash__(self) -> int: ...


class Limits(Protocol):
    """Which problems of its op an implementation takes."""

    def refusal(self, problem: Any) -> str | None:
        """Why it does not take a problem, worded to follow its name; None where it does."""


@dataclass(frozen=True)
class Function:
    """A function and the arguments that it is called with.

    A signature that does not accept them belongs to a version other than the one whose sources were read.
    """

    name: str
    arguments: tuple[str, ...] = ()
    """The names of keyword arguments."""
    positional: int = 0
    """The number of positional arguments, whose names differ between versions."""


@dataclass(frozen=True, eq=False)
class Implementation(Generic[B]):
    """A row of the table of implementations."""

    name: str
    homes: tuple[str, ...]
    """Modules that have it, its authors' first."""
    functions: tuple[Function, ...]
    attend: Callable[[Any, B], Sequence[Tensor]]
    """From the module and the arguments to the results, as the op returns them."""
    architectures: tuple[str, ...]
    limits: Limits
    first_on: tuple[str, ...] = ()
    """Architectures on which it is taken before ours without a measurement, because figures are known."""
    first_from: int = 1
    """The fewest rows for which it is taken so."""
    asked_by: tuple[str, ...] = (AUTO,)
    """The values of `mla.kernels` under which it is considered; not `auto` for what has not run on a GPU yet."""
    by_the_host: bool = False
    """Whether its launches, made from Python, may take longer than they save: then a graph has it, unless asked for,
    only if it is recorded in a CUDA graph."""

    def refusal(self, problem: Problem, arch: str) -> str | None:
        """Why it does not take a problem on an architecture; None where it does."""
        if arch not in self.architectures:
            return f"is for {' and '.join(self.architectures)}, this is {arch}"
        return self.limits.refusal(problem)

    def comes_first(self, problem: Problem, arch: str) -> bool:
        """Whether it is taken before ours when nothing is measured."""
        return arch in self.first_on and problem.rows >= self.first_from


@dataclass(frozen=True, eq=False)
class Op(Generic[B]):
    """An op that kernels other than its own may compute."""

    name: str
    implementations: tuple[Implementation[B], ...]
    """In the order in which they are considered."""
    problem_of: Callable[[B], Problem | None]
    """The problem of a bundle; None where sizes are symbols."""
    layout_of: Callable[[B], Hashable]
    """Everything about a bundle that the problem and the time depend on."""
    sizes_of: Callable[[B], tuple[int, ...]]
    """The sizes that grow, which the problem leaves out."""
    small: Callable[[B], B]
    """A small problem of the same kind, for the trial."""
    results_of: Callable[[B], tuple[str, ...]] = lambda _: O_AND_LSE
    """The names of a call's results."""

    def of(self, kernels: str) -> tuple[Implementation[B], ...]:
        """The implementations that are considered under a value of `mla.kernels`."""
        return tuple(each for each in self.implementations if kernels in each.asked_by)
