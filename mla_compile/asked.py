"""What the caller asks for, while a call and what autograd computes for it later are computed: which kernels (the
option `mla.kernels`), and whether they are measured against each other (`mode="max-autotune"`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

AUTO, OURS, GLUON = "auto", "triton", "gluon"
"""The values of `mla.kernels`."""

_ASKED: ContextVar[str] = ContextVar("asked", default=AUTO)
_MEASURED: ContextVar[bool] = ContextVar("measured", default=False)


def asked() -> str:
    """The value of `mla.kernels` here and now."""
    return _ASKED.get()


def told() -> dict[str, Any]:
    """The keyword arguments that tell an op with several implementations what is asked for here and now; empty where it
    is nothing. What autograd computes later, on a GPU in a thread of its own or from a graph, cannot ask."""
    kernels = {} if asked() == AUTO else {"kernels": asked()}
    return kernels | ({"measure": True} if _MEASURED.get() else {})


@contextlib.contextmanager
def kept_to(kernels: str) -> Iterator[None]:
    """Within this context, calls are computed by the implementations that a value of `mla.kernels` allows.

    So are the gradients of calls in it, wherever and whenever autograd computes them.
    """
    token = _ASKED.set(kernels)
    try:
        yield
    finally:
        _ASKED.reset(token)


@contextlib.contextmanager
def measured(on: bool = True) -> Iterator[None]:
    """Within this context, implementations of gradients are to be measured where autograd computes them later."""
    token = _MEASURED.set(on)
    try:
        yield
    finally:
        _MEASURED.reset(token)
