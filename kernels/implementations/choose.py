"""Choose which implementation computes a call: ours, or another that is installed, takes the call and agrees with ours.

The choice is made once for each layout of a call. Without measurements, another implementation comes before ours only
where figures are known (`Implementation.first_on`); while tuning is on, the one that was measured to be fastest is
taken, in this process or an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from ...asked import AUTO, OURS, asked, kept_to
from .._common.machine import Machine
from .._common.plans import Plans
from .._common.tuning import bucket, in_capture, is_on, timer, tuned, tuning, untuned
from .implementation import B, Implementation, Op, Problem
from .packages import found, is_installed
from .trial import disagreement

R = TypeVar("R", bound=Sequence[Tensor])
"""The results of an op."""
Attend = Callable[[B], Sequence[Tensor]]

CHOICES = Plans[Callable[..., Sequence[Tensor]]]()
_TRIED: dict[tuple[str, Problem, Machine], str | None] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Which implementation computes a problem, and why no other does."""

    op: str
    name: str
    others: dict[str, str]
    """For each other implementation, by name, why it is not taken."""

    def __str__(self) -> str:
        others = "".join(f"; {name} {why}" for name, why in self.others.items())
        return f"mla::{self.op}: {self.name}{others}"


@functools.cache
def any_installed(op: Op[B], kernels: str, arch: str, recorded: bool = True) -> bool:
    """Whether any other implementation for an architecture is installed in this process, under a value of
    `mla.kernels`; `recorded` as for `foreseen`."""
    of_arch = [each for each in op.of(kernels) if arch in each.architectures]
    return any(is_installed(each) and (recorded or not _left_out(each, kernels)) for each in of_arch)


class Told(Protocol):
    """Arguments that say what is asked for, where that cannot be asked."""

    @property
    def kernels(self) -> str | None: ...
    @property
    def measure(self) -> bool: ...


@contextlib.contextmanager
def as_told(x: Told) -> Iterator[None]:
    """Within this context, what is asked for is what a call was told."""
    with kept_to(x.kernels or asked()), tuning() if x.measure and not is_on() else contextlib.nullcontext():
        yield


def attend(op: Op[B], x: B, machine: Machine, ours: Callable[[B], R]) -> R:
    """The op's results, on a machine; `ours` computes any problem."""
    kernels = asked()
    if not any_installed(op, kernels, machine.arch):
        return ours(x)
    key = op.name, machine, kernels, timer() is None, op.layout_of(x)
    if key not in CHOICES and in_capture():
        return ours(x)  # an unknown implementation would have to be tried, which waits for the device
    try:
        chosen = CHOICES.get(key, lambda: _chosen(op, x, machine, ours, kernels))
    except torch.OutOfMemoryError:  # of a trial, for which there may be memory at another call
        return ours(x)
    return cast(R, chosen(x))


def foreseen(op: Op[B], x: B, machine: Machine, kernels: str = AUTO, *, recorded: bool = True) -> Verdict | None:
    """Which implementation would compute a call under a value of `mla.kernels`, as far as is known without running any;
    None where sizes are symbols. `recorded` is false for a call of a graph that no CUDA graph records."""
    problem = op.problem_of(x)
    if problem is None:
        return None
    reasons = _refusals(op, problem, machine, kernels)
    if not recorded:
        left_out = [each.name for each in op.implementations if _left_out(each, kernels)]
        why = "is launched from Python, which pays in a CUDA graph: mode='reduce-overhead' records one"
        reasons |= {name: why for name in left_out if name in reasons and reasons[name] is None}
    candidates = [each for each in op.of(kernels) if reasons[each.name] is None]
    return _verdict(op, _first(candidates, problem, machine), reasons)


def _chosen(op: Op[B], x: B, machine: Machine, ours: Attend[B], kernels: str) -> Attend[B]:
    problem = op.problem_of(x)
    assert problem is not None
    reasons = _refusals(op, problem, machine, kernels)
    ways = {OURS: ours}
    for each in op.of(kernels):
        wanted = timer() is not None or (len(ways) == 1 and each.comes_first(problem, machine.arch))
        if reasons[each.name] is None and wanted:
            way = functools.partial(each.attend, found(each).module)
            reasons[each.name] = _tried(op, each, way, problem, x, machine, ours)
            if reasons[each.name] is None:
                ways[each.name] = way
    name = list(ways)[1] if len(ways) > 1 else OURS
    if timer() is not None:
        name = _measured(op, x, problem, machine, ways)
    _log.info("%s", _verdict(op, name, reasons))
    return ways[name]


def _left_out(each: Implementation[B], kernels: str) -> bool:
    """Whether an implementation is not taken where no CUDA graph is recorded."""
    return each.by_the_host and kernels == AUTO


def _refusals(op: Op[B], problem: Problem, machine: Machine, kernels: str) -> dict[str, str | None]:
    """Why each implementation is not taken, None if it may be.

    Under `auto` this lists all implementations, else only those that are considered under the value.
    """
    listed = op.implementations if kernels == AUTO else op.of(kernels)
    return {each.name: _refusal(each, problem, machine, kernels) for each in listed}


def _refusal(each: Implementation[B], problem: Problem, machine: Machine, kernels: str) -> str | None:
    """Why an implementation is not taken, as far as is known without running it; the cheapest checks come first."""
    if kernels not in each.asked_by:
        return f"has not run on a GPU yet: mla.kernels={each.asked_by[0]!r} enables it"
    if not is_installed(each):
        return "is not installed"
    why = each.refusal(problem, machine.arch)
    return why if why is not None else found(each).why or None


def _tried(
    op: Op[B], each: Implementation[B], way: Attend[B], problem: Problem, x: B, machine: Machine, ours: Attend[B]
) -> str | None:
    key = f"{op.name} {each.name}", problem, machine
    if key not in _TRIED:
        with untuned():
            small = op.small(x)
            _TRIED[key] = disagreement(small, way, ours, op.results_of(small))
        if _TRIED[key] is not None:
            warnings.warn(f"mla::{op.name}: {each.name} of {found(each).package} {_TRIED[key]}", stacklevel=2)
    return _TRIED[key]


def _first(candidates: list[Implementation[B]], problem: Problem, machine: Machine) -> str:
    return next((each.name for each in candidates if each.comes_first(problem, machine.arch)), OURS)


def _measured(op: Op[B], x: B, problem: Problem, machine: Machine, ways: dict[str, Attend[B]]) -> str:
    """The name of the fastest implementation; ours is timed with its own fastest tiles."""
    if len(ways) == 1:
        return OURS
    present = timer()

    def run(name: str) -> Sequence[Tensor]:
        with tuning(present) if name == OURS else contextlib.nullcontext():
            return ways[name](x)

    packages = [found(each).package for each in op.implementations if each.name in ways]
    key = "implementation", op.name, *packages, problem, *map(bucket, op.sizes_of(x)), *op.results_of(x)
    return tuned(machine, key, OURS, lambda: list(ways)[1:], run, op.results_of(x))


def _verdict(op: Op[B], name: str, reasons: dict[str, str | None]) -> Verdict:
    others = {other: why or "is not known to be faster" for other, why in reasons.items() if other != name}
    return Verdict(op.name, name, others)
