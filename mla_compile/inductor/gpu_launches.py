"""Put launches of Triton kernels into a graph, in place of the ops that would launch them from Python.

Before   o, lse = mla.paged_latent_attention(q_latent, q_rope, pages, ...)
After    o, lse = empty, empty;  written = triton_kernel_wrapper_functional(attend_latents, grid, {o, lse, ...})
         o, lse = written["o"], written["lse"]

torch represents a user's Triton kernel in the same way. Inductor lets the kernel write directly to the empty tensors
and launches it like one of its own. The kernel writes to no other tensor of the graph, so nothing has to be copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves

from mla_compile.kernels.launches import launch_of
from mla_compile.passes.code.splicing import graph_of, inline
from mla_compile.passes.nodes.arguments import INTEGERS, arguments


def put_launches(graph: fx.Graph, kernels: str, *, guards: bool = True, recorded: bool = False) -> bool:
    """Replace ops on a GPU by their launches where `launch_of` has one, given a value of `mla.kernels`, and whether
    guards on sizes may be added and a CUDA graph records the launches. Return whether there are such ops, replaced or
    left to another kernel than ours.

    Raises: KernelError if arguments do not fit an op.
    """
    traced: dict[Hashable, fx.Graph] = {}
    left = False
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") != "mla" or not _on_gpu(node):
            continue
        given, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        launch = launch_of(node.target, given, named, kernels, guards=guards, recorded=recorded)
        if launch is None:
            left |= node.target == torch.ops.mla.paged_latent_attention.default
            continue
        sources = node.all_input_nodes
        key = _key(node, sources)
        if key not in traced:  # layers are alike
            traced[key] = _traced(launch, node, sources)
        for source in sources:
            if getattr(source.meta["val"], "dtype", None) in INTEGERS:
                # All launches of all layers share lengths and tables, which Inductor would recompute for each.
                source.meta["inductor_realize_to_strides"] = True
        _put(graph, node, traced[key], sources)
    return left or bool(traced)


def _on_gpu(node: fx.Node) -> bool:
    return any(isinstance(value, Tensor) and value.is_cuda for value in tree_leaves(node.meta["val"]))


def _key(node: fx.Node, sources: Sequence[fx.Node]) -> Hashable:
    """Everything that the trace of a node's launches depends on."""
    places = {source: i for i, source in enumerate(sources)}
    call = fx.node.map_arg((node.args, node.kwargs), lambda n: f"source {places[n]}")
    layouts = tuple(map(_layout, (source.meta["val"] for source in sources)))
    return node.target, repr(call), layouts


def _layout(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return str(value)
    return str(tuple(value.shape)), str(value.stride()), value.dtype, value.device


def _traced(launch: Callable[..., Any], node: fx.Node, sources: Sequence[fx.Node]) -> fx.Graph:
    """The launches as a graph whose inputs are the sources."""
    from mla_compile.kernels._common.launching import into_a_graph

    def code(*tensors: Tensor) -> Any:
        known = dict(zip(sources, tensors, strict=True))
        given, named = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        return into_a_graph(launch)(*given, **named)

    return graph_of(code, [source.meta["val"] for source in sources], select_decomp_table())


def _put(graph: fx.Graph, node: fx.Node, traced: fx.Graph, sources: Sequence[fx.Node]) -> None:
    with graph.inserting_before(node):
        results = inline(graph, traced, sources, node)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[arguments(user)[1]])
        graph.erase_node(user)
    graph.erase_node(node)
