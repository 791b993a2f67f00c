"""How transformers calls the argument that takes a cache: `past_key_values`, and `cache` from 5.24 on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_OLD, _NEW = "past_key_values", "cache"


def cache_argument(function: Callable[..., Any]) -> str:
    """The name of the argument by which `function` takes a cache: a module's `forward`, or a function that makes masks.

    `generate` hands its arguments on: it takes the name that its model's `forward` has.
    """
    return _NEW if _NEW in inspect.signature(function).parameters else _OLD


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, under either name; None if there is none."""
    return arguments.get(_NEW, arguments.get(_OLD))
