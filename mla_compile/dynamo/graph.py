"""Copy Dynamo's graphs so that AOTAutograd accepts the copies as Dynamo's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

EXAMPLE = "example_value"
"""The key under which Dynamo keeps a node's fake value in its `meta`."""


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors among a Dynamo node's example values."""
    return [value for value in pytree.tree_leaves(node.meta.get(EXAMPLE)) if isinstance(value, Tensor)]


def dtypes_on_cpu(module: fx.GraphModule, inputs: Iterable[Any]) -> list[torch.dtype]:
    """The dtypes of the inputs, parameters and buffers of a graph that are on the CPU."""
    tensors = itertools.chain(inputs, module.parameters(), module.buffers())
    return [t.dtype for t in tensors if isinstance(t, Tensor) and t.is_cpu]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed, with everything that Dynamo recorded about the module and its inputs.

    A copy by `fx` alone lacks the source of each input. Without it no parameter or cache has a static address: CUDA
    graphs would copy the weights at each replay, and would be skipped where a cache is written in place.
    """
    new: Any = fx.GraphModule(module, copy.deepcopy(module.graph))
    new.meta = dict(module.meta)
    for name in ("_param_name_to_source", "_backend_id"):  # the latter under `caching_precompile`
        if hasattr(module, name):
            setattr(new, name, getattr(module, name))
    before, after = (graph.find_nodes(op="placeholder") for graph in (module.graph, new.graph))
    for old, input in zip(before, after, strict=True):
        # Dynamo drops this from its own graph at the end: its weak reference would keep a tensor from being swapped.
        input.meta.pop("grapharg", None)
        if hasattr(old, "_dynamo_source"):
            input._dynamo_source = old._dynamo_source
    assert isinstance(new, fx.GraphModule)
    return new
