"""Warn from `torch.compile(model, backend="mla").generate(...)`, which runs the uncompiled model.

`torch.compile` of a module returns an `OptimizedModule`: its `forward` is compiled, and all other attributes are the
module's. So `generate` is the module's too and calls the module's own forward, which never reaches a backend. However,
torch runs its module registration hooks when the `OptimizedModule` registers the module. Our hook gives that object a
`generate` that warns first. No class or function of torch is changed.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook

MESSAGE = (
    'torch.compile(model, backend="mla").generate(...) runs the uncompiled model: `generate` is the model\'s, '
    'and calls its own forward. Write model.compile(backend="mla"), then model.generate(...)'
)


def warn_of_generate(backend: Callable[..., Any]) -> None:
    """From now on, make every object that `torch.compile(module, backend=backend)` returns warn in `generate`."""

    def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if torch.compiler.is_compiling():  # under compiled autograd Dynamo traces this with the object half made
            return
        if name == "_orig_mod" and isinstance(module, OptimizedModule) and hasattr(submodule, "generate"):
            # Its backend is known only later. The reference is weak because a cycle would keep the weights alive.
            generate = functools.partial(_generate, backend, weakref.ref(module), submodule)
            object.__setattr__(module, "generate", generate)

    register_module_module_registration_hook(on_registration)


def _generate(
    backend: Callable[..., Any],
    optimized: weakref.ref[OptimizedModule],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _backend_of(optimized()) is backend and model._compiled_call_impl is None:
        warnings.warn(MESSAGE, stacklevel=2)
    return model.generate(*args, **kwargs)


def _backend_of(optimized: OptimizedModule | None) -> Any:
    """The function to which `torch.compile` resolved its `backend` argument."""
    if optimized is None:
        return None
    callback: Any = optimized.dynamo_ctx.callback
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", callback)
