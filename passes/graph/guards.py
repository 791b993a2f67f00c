"""Graphs that take no guards: those of exported programs, whose code serves every size that they are declared for.

torch freezes the shape environment of such a program and from then on ignores new guards: code that was traced with
one would be wrong for other sizes, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class GuardNeeded(Exception):
    """What would have to hold of the sizes."""


@contextmanager
def no_guards(environment: ShapeEnv | None) -> Iterator[None]:
    """Raise GuardNeeded wherever something would add a guard to the environment."""
    if environment is None:
        yield
        return

    def refuse(expression: sympy.Basic, value: sympy.Basic) -> None:
        raise GuardNeeded(str(expression) if value == sympy.true else f"{expression} = {value}")

    # torch calls this method before it adds a guard (torch 2.13 has `error_on_new_guards` for the same, 2.11 has not).
    vars(environment)["_check_frozen"] = refuse
    try:
        yield
    finally:
        del vars(environment)["_check_frozen"]
