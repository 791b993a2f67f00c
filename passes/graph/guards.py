"""Refuse guards in graphs that take none: those of exported programs, whose code serves every size declared for them.

torch freezes the shape environment of such a program and ignores new guards from then on. Code that was traced with
one would be silently wrong for other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv


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
    vars(environment)["_check_frozen"] = refuse
    try:
        yield
    finally:
        del vars(environment)["_check_frozen"]
