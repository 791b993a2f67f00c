"""Interpret graphs instead of generating C++ for them: the same graphs, in less time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._functorch import config as functorch_config

from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted


@contextlib.contextmanager
def without_codegen() -> Iterator[None]:
    """Within this context Inductor generates no code, neither for rewritten graphs nor for those left to it."""
    with (
        mock.patch.object(codegen, "compile_fx_inner", interpreted),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
