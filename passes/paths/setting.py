"""What the choices for one graph depend on besides its sites: what is asked for, the device, and what sizes may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from mla_compile.cost import Device

from ..nodes.guards import declared_ranges
from ..nodes.shapes import unbacked_in
from . import all as every
from .agreement import NO_AGREEMENT, Agreement

Ranges = Mapping[sympy.Symbol, ValueRanges]
IN_THE_EXAMPLE = " in the exported example, right for all sizes"
"""Said of a choice that is the best one at the sizes of an export, but perhaps not at all others of its ranges."""


@dataclass(frozen=True)
class Setting:
    """The setting of the choices for one graph.

    Raises:
        ValueError: if no path is called `wanted`.
    """

    wanted: str
    """The word of a path, taken at every site that it is a path of, or `auto`."""
    device: Device
    workspace_tokens: int
    environment: ShapeEnv | None
    ranges: Ranges | None = None
    """The ranges of all symbols, if the graph takes no guards: where no path is the fastest at all sizes, the graph may
    have to choose."""
    training: bool = False
    """Whether the graph needs gradients."""
    agreement: Agreement = NO_AGREEMENT
    """What the ranks of a group that shares out keys agree on."""

    def __post_init__(self) -> None:
        every.check_asked(self.wanted)

    def always(self, conditions: Iterable[Relational]) -> bool:
        """Whether conditions `a >= b` or `a <= b` provably hold for all sizes: without ranges, they become guards."""
        return self.ranges is None or all(_holds(condition, self.ranges) for condition in conditions)

    def unguarded(self, conditions: Iterable[Relational]) -> set[sympy.Symbol]:
        """Symbols that conditions depend on and that cannot be guarded: of what only a run knows, and those whose
        range, which the user declared, a guard would narrow."""
        found, declared = set[sympy.Symbol](), declared_ranges(self.environment)
        for condition in conditions:
            found |= unbacked_in(condition)
            own = declared.keys() & condition.free_symbols
            if own and self.environment and not _holds(condition, {**self.environment.var_to_range, **declared}):
                found |= own
        return found

    def guard(self, conditions: Iterable[Relational]) -> tuple[str, ...]:
        """Add guards for the conditions that depend on symbols and can be guarded, and return them as text."""
        conditions = tuple(conditions)
        left = self.unguarded(conditions)
        guarded = [c for c in conditions if c.free_symbols and not c.free_symbols & left]
        for condition in guarded:
            assert self.environment is not None
            holds = bool(torch.SymBool(_guarded(self.environment, condition)))
            assert holds, f"the cost model's condition {condition} does not hold at its own hints"
        return tuple(map(str, guarded))


def _holds(condition: Relational, ranges: Ranges) -> bool:
    """Whether a condition `a >= b` or `a <= b` provably holds for all sizes of the ranges."""
    sign = 1 if isinstance(condition, sympy.Ge) else -1
    margin = sympy.expand(sign * (condition.lhs - condition.rhs))
    return bool(bound_sympy(margin, dict(ranges)).lower >= 0)


def _guarded(environment: ShapeEnv, condition: sympy.Basic) -> object:
    return environment.create_symboolnode(condition).node
