"""What is chosen for a site, and what its choices are between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sympy.core.relational import Relational

from mla_compile.cost import Named

from ..mla.site import Site
from .either import Either
from .path import Path
from .plan import Plan


@dataclass(frozen=True)
class Choice:
    """What a site becomes, why, and the guards that were added for it."""

    plan: Plan | Either
    why: str
    guards: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """What reports call the path."""
        return self.plan.word

    @property
    def reason(self) -> str:
        """A sentence for the report: why this path, and how it reads the keys."""
        return "; ".join(filter(None, (self.why, self.plan.words)))


@dataclass(frozen=True)
class Candidates:
    """The paths to choose from, the plan of a site for each, and the conditions under which that holds."""

    paths: tuple[Path, ...]
    plan: Callable[[Path], Plan]
    conditions: tuple[Relational, ...] = ()


def numbers(site: Site, named: Named | None = None) -> str:
    """The sizes on which a choice rests most, for the report."""
    numbers = ", ".join(f"{name}={site.sizes[name]}" for name in ("Sq", "T"))
    if site.attention.packed is not None:
        numbers += f" in {site.attention.packed.sequences} sequences"
    return numbers if named is None else f"{numbers}, topk={named.count}"
