"""Say which implementation will compute each op of a graph on a GPU, for reports, before anything has run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.dynamo.graph import EXAMPLE, tensors_of
from mla_compile.kernels._common.machine import present
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention, ExpandedAttentionBackward
from mla_compile.kernels.implementations.choose import foreseen
from mla_compile.kernels.implementations.implementation import Op
from mla_compile.kernels.implementations.packages import versions
from mla_compile.kernels.implementations.table import EXPANDED, GRADIENTS, NAMED, PAGED
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention
from mla_compile.passes.nodes.arguments import argument
from mla_compile.passes.nodes.walk import walk

VALUE = "val"
"""The key under which AOTAutograd keeps a node's fake value in its `meta`."""

_OPS: dict[Any, tuple[Op[Any], Callable[..., Any]]] = {
    torch.ops.mla.paged_latent_attention.default: (PAGED, PagedLatentAttention),
    torch.ops.mla.sparse_latent_attention.default: (NAMED, SparseLatentAttention),
    torch.ops.mla.expanded_attention.default: (EXPANDED, ExpandedAttention),
}


def kernels_of(graph: fx.Graph, kernels: str, *, recorded: bool = False) -> tuple[str, ...]:
    """Sentences that say which implementation will compute the ops with more than one, given a value of `mla.kernels`
    and whether a CUDA graph records the launches. Empty on CPU."""
    found = _calls(graph, VALUE)
    return tuple(dict.fromkeys(_sentence(op, x, o, kernels, recorded) for _, op, x, (o, _) in found))


def kernels_of_training(module: fx.GraphModule, kernels: str, *, recorded: bool = False) -> tuple[str, ...]:
    """The same of a Dynamo graph whose ops torch will differentiate, of their gradients too, and of its checkpoints."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    said = (_of_training(*call, kernels, recorded) for graph in graphs for call in _calls(graph, EXAMPLE))
    return tuple(dict.fromkeys(sentence for sentences in said for sentence in sentences))


def packages_for(inputs: Iterable[Any]) -> tuple[str, ...]:
    """The names and versions of the installed packages that may compute ops of a graph with these inputs."""
    if not any(isinstance(t, torch.Tensor) and t.is_cuda for t in inputs):
        return ()
    return versions(tuple(each for op, _ in _OPS.values() for each in op.implementations))


def _calls(graph: fx.Graph, key: str) -> Iterator[tuple[fx.Node, Op[Any], Any, tuple[Tensor, Tensor]]]:
    """The nodes on a GPU that call ops with several implementations: op, arguments and results; `key` as in `meta`."""

    def value(argument: Any) -> Any:
        return argument.meta[key] if isinstance(argument, fx.Node) else argument

    for node in graph.nodes:
        if node.target in _OPS and _is_on_gpu(node.meta[key][0]):
            op, bundle = _OPS[node.target]
            named = {name: value(argument) for name, argument in node.kwargs.items()}
            yield node, op, bundle(*map(value, node.args), **named), node.meta[key]


def _of_training(
    node: fx.Node, op: Op[Any], x: Any, results: tuple[Tensor, Tensor], kernels: str, recorded: bool
) -> Iterator[str]:
    o, lse = results
    yield _sentence(op, x, o, kernels, recorded)
    if not o.requires_grad:
        return
    if _learns(argument(node, "mask")):
        yield f"mla::{GRADIENTS.name}: ATen operations, for the gradient of a mask"
        return
    reads_lse = any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
    gradients = ExpandedAttentionBackward(
        **vars(x), grad_o=o, grad_lse=lse if reads_lse else None, o=o, lse=lse, wanted=[True] * 5 + [False]
    )
    yield _sentence(GRADIENTS, gradients, o, kernels, recorded)


def _learns(mask: Any) -> bool:
    """Whether a mask of a Dynamo graph has a gradient: code that was put there is marked as if it always had one."""
    if not isinstance(mask, fx.Node):
        return False
    own = walk([mask], lambda node: [each for each in node.all_input_nodes if _has_gradient(each)])
    return any(node.op in ("placeholder", "get_attr") and _has_gradient(node) for node in own)


def _has_gradient(node: fx.Node) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(node))


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _sentence(op: Op[Any], x: Any, result: Tensor, kernels: str, recorded: bool) -> str:
    choice = foreseen(op, x, present(result.device), kernels, recorded=recorded)
    return f"mla::{op.name}: decided at each call, by its sizes" if choice is None else str(choice)
