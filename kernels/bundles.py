"""An op's arguments as one bundle: a frozen dataclass with the names, order and defaults of the op's schema.

The bundle is built and checked once, where torch calls the op; the functions that compute take the bundle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mla_compile import ops


class Bundle(Protocol):
    """The arguments of an op."""

    def check(self) -> None:
        """Check that the arguments fit the op. Raises: KernelError."""


B = TypeVar("B", bound=Bundle)
R = TypeVar("R")


def checked(bundle: Callable[..., B], compute: Callable[[B], R]) -> Callable[..., R]:
    """The function that torch calls for an op: check the arguments, then `compute` them."""

    def implementation(*arguments: Any, **named: Any) -> R:
        whole = bundle(*arguments, **named)
        whole.check()
        return compute(whole)

    return implementation


def implement(op: str, key: str, implementation: Callable[..., Any]) -> None:
    """Register the function that torch calls for `mla::<op>` under a dispatch key."""
    assert op in ops.__all__
    torch.library.impl(f"mla::{op}", key)(implementation)


def unchecked(bundle: Callable[..., B], compute: Callable[[B], R]) -> Callable[..., R]:
    """Like `checked`, without the check: for the equations, which take any dtype and never read values."""

    def equation(*arguments: Any, **named: Any) -> R:
        return compute(bundle(*arguments, **named))

    return equation
