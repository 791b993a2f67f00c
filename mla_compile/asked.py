"""Which kernels the caller asks for: the option `mla.kernels`, while a call and its gradients are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

AUTO, OURS, GLUON = "auto", "triton", "gluon"
"""The values of `mla.kernels`."""

_ASKED: ContextVar[str] = ContextVar("asked", default=AUTO)


def asked() -> str:
    """The value of `mla.kernels` here and now."""
    return _ASKED.get()


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
