"""Run rewritten graphs without Inductor's code generation: for `explain`, and for the many tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func

_guards: Any = torch._C._dynamo.guards  # Inductor's generated code calls it too; it is not in torch's stubs


def interpreted(module: torch.fx.GraphModule, inputs: object, **kwargs: object) -> Callable[..., Any]:
    """A substitute for `compile_fx_inner` that runs the rewritten and retraced graph as it is."""

    def run(*arguments: object) -> tuple[object, ...]:
        return tuple(without_base(output) for output in module.forward(*arguments))

    return make_boxed_func(run)


def without_base(output: object) -> object:
    """Return a view as Inductor does: as a tensor without a `_base`."""
    if not isinstance(output, torch.Tensor) or output._base is None:
        return output
    return _guards._reinterpret_tensor(output, tuple(output.shape), output.stride())
