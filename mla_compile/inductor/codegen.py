"""Have Inductor compile a graph: as it stands, or as one with ops of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from mla_compile.graph_log import log_graph

from .gpu_accesses import accesses_remembered
from .gpu_launches import put_launches
from .gpu_products import products_of
from .gpu_together import together
from .gpu_writes import write_in_parts
from .loops import settings_of_loops
from .row_prefetches import rows_prefetched


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph with AOTAutograd and Inductor. Other arguments are those of Inductor's `compile_fx`."""
    compiled: Any = compile_fx(module, list(inputs), **{"inner_compile": plain} | kwargs)
    assert callable(compiled)
    return compiled


def plain(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """The code of a graph as it stands; arguments as for Inductor's `compile_fx_inner`."""
    return compile_fx_inner(module, inputs, **kwargs)


def generated(
    module: fx.GraphModule, inputs: Sequence[Any], kernels: str, settings: Mapping[str, Any], **kwargs: Any
) -> Any:
    """The code of a rewritten graph; arguments as for Inductor's `compile_fx_inner`.

    `kernels` is `mla.kernels`, and `settings` are those of Inductor that the user has chosen.
    """
    # Under max_autotune, tiles and implementations are timed at an op's first call, so ops have to stay ops.
    decodes = not inductor_config.max_autotune and put_launches(module.graph, kernels, recorded=records_cuda_graphs())
    if decodes:
        write_in_parts(module.graph)
        module.recompile()
        log_graph("mla_launches", module)
    with (
        inductor_config.patch(settings_of_loops(module)),
        products_of(module.graph),
        rows_prefetched(),
        accesses_remembered() if decodes else contextlib.nullcontext(),
        # Leave combo kernels alone if the user has set the option.
        together() if decodes and "combo_kernels" not in settings else contextlib.nullcontext(),
    ):
        return compile_fx_inner(module, inputs, **kwargs)


def records_cuda_graphs() -> bool:
    """Whether Inductor is asked to record what it compiles here and now in CUDA graphs."""
    return bool(inductor_config.triton.cudagraphs)


def recorded_or_measured() -> bool:
    """Whether an op's kernels are recorded, or measured against each other at its first call, here and now."""
    return records_cuda_graphs() or bool(inductor_config.max_autotune)
