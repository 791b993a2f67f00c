"""Interpret graphs instead of generating C++ for them: the same graphs, in less time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._functorch import config as functorch_config

from mla_compile import compilation
from mla_compile.inductor.interpreted import interpreted


@contextlib.contextmanager
def without_codegen() -> Iterator[None]:
    """Within this context Inductor generates no code, neither for rewritten graphs nor for those left to it."""
    compile_fx = compilation._compile_fx

    def interpret(module: Any, inputs: Any, **settings: Any) -> Callable[..., Any]:
        return compile_fx(module, inputs, **{"inner_compile": interpreted} | settings)

    with (
        mock.patch.object(compilation, "_compile_fx", interpret),
        mock.patch.object(compilation, "compile_fx_inner", interpreted),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
