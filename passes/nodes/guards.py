"""Guards on sizes, and graphs that take none: exported programs, whose code serves every size declared for them.

torch freezes the shape environment of such a program and ignores new guards from then on. Code that was traced with
one would be silently wrong for other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from mla_compile.errors import PassesError

from ..algebra.sizes import same
from .shapes import size_of


class GuardNeeded(Exception):
    """A guard was needed. Its text says what would have to hold of the sizes."""


@contextmanager
def no_guards(environment: ShapeEnv | None) -> Iterator[None]:
    """Raise GuardNeeded wherever something would add a guard to the environment."""
    if environment is None:
        yield
        return

    def refuse(expression: sympy.Basic, value: sympy.Basic) -> None:
        raise GuardNeeded(str(expression) if value == sympy.true else f"{expression} = {value}")

    # torch calls this method before it adds a guard (torch 2.13 has `error_on_new_guards` for the same, 2.11 has not).
    if not hasattr(environment, "_check_frozen"):
        raise PassesError("this version of torch does not say when it adds a guard: see the supported versions")
    vars(environment)["_check_frozen"] = refuse
    try:
        yield
    finally:
        del vars(environment)["_check_frozen"]


def declared_ranges(environment: ShapeEnv | None) -> dict[sympy.Symbol, ValueRanges]:
    """The ranges that a user declared for sizes of inputs by `mark_dynamic(tensor, dim, min=, max=)`: torch refuses a
    graph with a guard that narrows one."""
    found: dict[sympy.Symbol, ValueRanges] = {}
    for tracked in getattr(environment, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
                found |= dict.fromkeys(size.node.expr.free_symbols, constraint.vr)
    return found


def known_by_guard(size: int | torch.SymInt) -> int | None:
    """What a size is: provably, or now and by a guard from now on.

    None where a run alone knows, and where the graph takes no guards.
    """
    if isinstance(size, torch.SymInt) and not size.node.has_hint():
        return None
    try:
        return int(size)
    except GuardNeeded:
        return None


def equal_by_guard(a: Any, b: Any) -> bool:
    """Whether two sizes, ints or SymInts or nodes of such, are equal: provably, or now and by a guard from now on.

    False where they differ now, where a run alone knows, and where the graph takes no guards.
    """
    a, b = (size.meta["val"] if isinstance(size, fx.Node) else size for size in (a, b))
    if same(size_of(a), size_of(b)):
        return True
    symbols = [size.node for size in (a, b) if isinstance(size, torch.SymInt)]
    if not symbols or not all(symbol.has_hint() for symbol in symbols):
        return False
    if len({size.node.hint if isinstance(size, torch.SymInt) else size for size in (a, b)}) > 1:
        return False
    try:
        return bool(a == b)
    except GuardNeeded:
        return False
