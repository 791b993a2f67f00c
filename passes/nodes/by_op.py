"""Tables by op, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F")


class ByOp(dict[Any, F]):
    """Functions by the ops that they handle: `@TABLE.of(op, ...)` adds one."""

    def of(self, *targets: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            self.update(dict.fromkeys(targets, function))
            return function

        return register
