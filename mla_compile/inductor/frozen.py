"""Run Inductor's `freezing`, which turns parameters into constants packed for the machine, after the passes.

Before the passes, a packed weight would hide that keys and values are an up-projection by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor.utils import BoxedBool


def compile_frozen(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    dynamo_module: fx.GraphModule,
    code: Callable[..., Any],
    options: dict[str, Any],
) -> Callable[[list[Any]], Any]:
    """Freeze the parameters of a rewritten graph, and compile what is left of it by `code`.

    `code` has the signature of Inductor's inner compiler, and `options` are the arguments that it got for the whole
    graph. The returned function takes the list of all inputs; those that became constants may be None.
    """
    freeze: Callable[..., Any] = compile_fx.fw_compiler_freezing
    last = options["cudagraphs"], options["graph_id"], options["boxed_forward_device_index"]
    if "compiler_config_extra" in inspect.signature(freeze).parameters:  # torch 2.15
        not_partitioned = BoxedBool(False)  # only a backward graph would read it
        return freeze(
            module, inputs, dynamo_module, len(inputs), code, compile_fx.CompilerConfigExtra(*last, not_partitioned)
        )
    return freeze(module, inputs, dynamo_module, len(inputs), code, *last)


def parameters() -> list[Tensor | None]:
    """The values of a graph's first inputs, which freezing removes from the arguments of a call."""
    context = torch._guards.TracingContext.try_get()
    return list((context and context.params_flat_unwrap_subclasses) or ())
