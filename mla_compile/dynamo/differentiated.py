"""Find out whether a Dynamo graph is differentiated by its callers, by itself, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .graph import EXAMPLE, tensors_of

_OWN = {"_grad_increment_nesting", "_jvp_increment_nesting", "_autograd_grad", "grad"}
"""Names of functions in a graph that differentiates or begins to: those of `torch.func` and `torch.autograd.grad`."""


def by_callers(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether callers may ask for gradients of a graph's results, by AOTAutograd's criteria: results computed under
    `no_grad` or `inference_mode` within the graph have none."""
    if not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return False
    *_, output = module.graph.nodes
    if any(EXAMPLE not in node.meta for node in output.all_input_nodes):
        return True  # unknown
    results = [value for node in output.all_input_nodes for value in tensors_of(node)]
    written = [
        value
        for node in module.graph.find_nodes(op="placeholder")
        for value in tensors_of(node)
        if not value.is_inference() and value._version > 0
    ]
    return any(value.requires_grad for value in (*results, *written))


def by_itself(module: fx.GraphModule) -> bool:
    """Whether a graph itself computes gradients."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(
        node.op == "call_function" and getattr(node.target, "__name__", "") in _OWN
        for graph in graphs
        for node in graph.nodes
    )
