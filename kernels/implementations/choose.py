"""Which implementation computes a call: ours, or another project's that is installed, takes it, and agrees with ours.

Chosen once for each layout of a call. Unmeasured, another one comes before ours where its authors' figures are known
(`Implementation.first_on`); while tuning is on, the one that was measured to be the fastest, in this process or before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .._common.machine import Machine
from .._common.plans import Plans, layout
from .._common.tuning import bucket, in_capture, timer, tuned, tuning
from .implementation import Implementation
from .packages import found, is_installed
from .problem import Problem, whole_rows
from .table import TABLE
from .trial import disagreement

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

Attend = Callable[["PagedLatentAttention"], tuple[Tensor, Tensor]]

OP = "paged_latent_attention"
OURS = "triton"
_OURS_ALONE: ContextVar[bool] = ContextVar("ours_alone", default=False)
CHOICES = Plans[Attend]()
_TRIED: dict[tuple[Implementation, Problem, Machine], str | None] = {}
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def ours_alone() -> Iterator[None]:
    """Calls in this context are computed by the kernels of this project."""
    token = _OURS_ALONE.set(True)
    try:
        yield
    finally:
        _OURS_ALONE.reset(token)


@dataclass(frozen=True)
class Choice:
    """What computes a problem, and why nothing else does."""

    name: str
    others: dict[str, str]
    """By the name of each other implementation, why it is not taken."""

    def __str__(self) -> str:
        others = "".join(f"; {name} {why}" for name, why in self.others.items())
        return f"mla::{OP}: {self.name}{others}"


@functools.cache
def any_installed() -> bool:
    """Whether there is anything to choose from in this process."""
    return any(map(is_installed, TABLE[OP]))


def attend(x: PagedLatentAttention, machine: Machine, ours: Attend) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine; `ours` computes any problem."""
    if not any_installed() or _OURS_ALONE.get():
        return ours(x)
    tensors = x.q_latent, x.q_rope, x.latent_pages, x.rope_pages, x.block_table, x.seq_lens, x.latent_scales, x.mask
    asked = x.causal, x.split_tokens is None, x.first_positions is None, whole_rows(x.latent_pages, x.rope_pages)
    key = machine, timer() is None, asked, *map(layout, tensors)
    if key not in CHOICES and in_capture():
        return ours(x)  # what is not known yet would have to be tried, which waits for the device
    return CHOICES.get(key, lambda: _chosen(x, machine, ours))(x)


def foreseen(x: PagedLatentAttention, machine: Machine, *, alone: bool = False) -> Choice | None:
    """What would compute a call, as far as is known without its tensors; None where its sizes are symbols."""
    problem = Problem.of(x)
    if problem is None:
        return None
    if alone:
        return Choice(OURS, {})
    reasons = {other.name: _refusal(other, problem, machine) for other in TABLE[OP]}
    standing = [other for other in TABLE[OP] if reasons[other.name] is None]
    return _choice(_unmeasured(standing, problem, machine), reasons)


def _chosen(x: PagedLatentAttention, machine: Machine, ours: Attend) -> Attend:
    problem = Problem.of(x)
    assert problem is not None
    reasons = {other.name: _refusal(other, problem, machine) for other in TABLE[OP]}
    ways = {OURS: ours}
    for other in TABLE[OP]:
        if reasons[other.name] is None:
            way = functools.partial(other.attend, found(other).module)
            reasons[other.name] = _tried(other, way, problem, x, machine, ours)
            if reasons[other.name] is None:
                ways[other.name] = way
    if timer() is None:
        name = _unmeasured([other for other in TABLE[OP] if other.name in ways], problem, machine)
    else:
        name = _measured(x, problem, machine, ways)
    _log.info("%s", _choice(name, reasons))
    return ways[name]


def _refusal(other: Implementation, problem: Problem, machine: Machine) -> str | None:
    """What is known without running it, the cheapest to find out first."""
    if not is_installed(other):
        return "is not installed"
    why = other.refusal(problem, machine.arch)
    return why if why is not None else found(other).why or None


def _tried(
    other: Implementation, way: Attend, problem: Problem, x: PagedLatentAttention, machine: Machine, ours: Attend
) -> str | None:
    key = other, problem, machine
    if key not in _TRIED:
        _TRIED[key] = disagreement(x, way, ours)
        if _TRIED[key] is not None:
            warnings.warn(f"mla::{OP}: {other.name} of {found(other).package} {_TRIED[key]}", stacklevel=2)
    return _TRIED[key]


def _unmeasured(standing: list[Implementation], problem: Problem, machine: Machine) -> str:
    return next((other.name for other in standing if other.comes_first(problem, machine.arch)), OURS)


def _measured(x: PagedLatentAttention, problem: Problem, machine: Machine, ways: dict[str, Attend]) -> str:
    """The name of the fastest way, ours with its own fastest tiles."""
    if len(ways) == 1:
        return OURS
    present = timer()

    def run(name: str) -> object:
        with tuning(present) if name == OURS else contextlib.nullcontext():
            return ways[name](x)

    packages = [found(other).package for other in TABLE[OP] if other.name in ways]
    grown = bucket(x.q_latent.shape[0]), bucket(x.block_table.shape[1] * problem.page_size)
    key = "implementation", OP, *packages, problem.dtype, problem.queries, problem.heads, *problem.widths
    return tuned(machine, (*key, problem.page_size, problem.causal, *grown), OURS, lambda: list(ways)[1:], run)


def _choice(name: str, reasons: dict[str, str | None]) -> Choice:
    others = {other: why or "is not known to be faster" for other, why in reasons.items() if other != name}
    return Choice(name, others)
