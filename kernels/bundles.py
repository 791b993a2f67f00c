"""An op's arguments in one bundle, a frozen dataclass with the names, the order and the defaults of its schema.

They are put together and checked once, where torch calls; what computes takes the bundle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mla_compile import ops


class Bundle(Protocol):
    """The arguments of an op."""

    def check(self) -> None:
        """Raises: KernelError, if they do not fit the op."""


B = TypeVar("B", bound=Bundle)
R = TypeVar("R")


def checked(bundle: Callable[..., B], compute: Callable[[B], R]) -> Callable[..., R]:
    """What torch calls for an op: `compute` of its arguments, which are checked."""

    def implementation(*arguments: Any, **named: Any) -> R:
        whole = bundle(*arguments, **named)
        whole.check()
        return compute(whole)

    return implementation


def implement(op: str, key: str, implementation: Callable[..., Any]) -> None:
    """Make it what torch calls for `mla::<op>` under a dispatch key."""
    assert op in ops.__all__
    torch.library.impl(f"mla::{op}", key)(implementation)


def unchecked(bundle: Callable[..., B], compute: Callable[[B], R]) -> Callable[..., R]:
    """The same for what looks at no value and takes any dtype: the equations."""

    def equation(*arguments: Any, **named: Any) -> R:
        return compute(bundle(*arguments, **named))

    return equation
