"""Put torch code into a graph: trace the code by itself, and copy its nodes to their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr")


def graph_of(
    emit: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph:
    """The graph of torch code, traced as a function of fake tensors and sizes."""
    mode = torch._guards.detect_fake_mode(values)
    assert mode is not None
    # As a compilation does, take matmul from Python: torch 2.11's in C++ asks symbolic sizes for element counts.
    with mode, enable_python_dispatcher():
        # Without any table, torch >= 2.15 writes aliases, which have gradients, for `detach`.
        return make_fx(emit, decompositions or {}, tracing_mode="real")(*values).graph


def emit(
    graph: fx.Graph,
    code: Callable[..., Any],
    sources: Sequence[fx.Node],
    origin: fx.Node,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Any:
    """Trace torch code as a function of `sources` and put it at the insertion point of `graph`;
    returns the result's node."""
    return inline(graph, graph_of(code, [source.meta["val"] for source in sources], decompositions), sources, origin)


def inline(graph: fx.Graph, inner: fx.Graph, arguments: Sequence[fx.Node], origin: fx.Node) -> Any:
    """Copy the nodes of `inner` to the insertion point of `graph`; returns the node, or the nodes, of its output."""
    mapped: dict[fx.Node, fx.Node] = {}
    result: Any = None
    supply = iter(arguments)
    for node in inner.nodes:
        if node.op == "placeholder":
            mapped[node] = next(supply)
        elif node.op == "output":
            result = fx.map_arg(node.args[0], mapped.__getitem__)
        elif node.op == "get_attr":
            mapped[node] = graph.get_attr(adopted(graph, getattr(inner.owning_module, node.target)))
        else:
            copied = graph.node_copy(node, mapped.__getitem__)
            copied.meta.update({key: origin.meta[key] for key in _COPIED_META if key in origin.meta})
            mapped[node] = copied
    return result


def adopted(graph: fx.Graph, code: Any) -> str:
    """The name of `code`, a graph that an op takes, in the module of `graph`, to which it is added if need be."""
    owner = graph.owning_module
    assert owner is not None
    known = {child: own for own, child in owner.named_children()}
    if code not in known:
        known[code] = f"mla_code_{len(known)}"
        owner.add_module(known[code], code)
    return known[code]
