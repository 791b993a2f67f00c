"""Rewritten graphs without Inductor's code: to see what became of them, and for tests, of which there are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func

_guards: Any = torch._C._dynamo.guards  # what Inductor's code calls too; torch's stubs leave it out


def interpreted(module: torch.fx.GraphModule, inputs: object, **kwargs: object) -> Callable[..., Any]:
    """In place of `compile_fx_inner`: run what the passes and the retrace made as it is."""

    def run(*arguments: object) -> tuple[object, ...]:
        return tuple(without_base(output) for output in module.forward(*arguments))

    return make_boxed_func(run)


def without_base(output: object) -> object:
    """A view of a tensor of the graph as Inductor returns it: one that does not know what it is a view of."""
    if not isinstance(output, torch.Tensor) or output._base is None:
        return output
    return _guards._reinterpret_tensor(output, tuple(output.shape), output.stride())
