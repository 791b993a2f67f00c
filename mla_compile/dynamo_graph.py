"""Copies of Dynamo's graphs that AOTAutograd takes for graphs of Dynamo."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed, with all that Dynamo says of the module and its inputs.

    What `fx` leaves behind is where each input is from. Without it no parameter and no cache counts as staying where it
    is: CUDA graphs copy the weights at each replay, and are skipped where a cache is written in place.
    """
    new: Any = fx.GraphModule(module, copy.deepcopy(module.graph))
    new.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        new._param_name_to_source = module._param_name_to_source
    before, after = (graph.find_nodes(op="placeholder") for graph in (module.graph, new.graph))
    for old, input in zip(before, after, strict=True):
        if hasattr(old, "_dynamo_source"):
            input._dynamo_source = old._dynamo_source
    assert isinstance(new, fx.GraphModule)
    return new
