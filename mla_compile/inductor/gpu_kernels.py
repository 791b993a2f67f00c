"""Say which implementation will compute each op of a graph on a GPU, for reports, before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mla_compile.kernels._common.machine import present
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention
from mla_compile.kernels.implementations.choose import foreseen
from mla_compile.kernels.implementations.implementation import Op
from mla_compile.kernels.implementations.packages import versions
from mla_compile.kernels.implementations.table import EXPANDED, PAGED
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

_OPS: dict[Any, tuple[Op[Any], Callable[..., Any]]] = {
    torch.ops.mla.paged_latent_attention.default: (PAGED, PagedLatentAttention),
    torch.ops.mla.expanded_attention.default: (EXPANDED, ExpandedAttention),
}


def kernels_of(graph: fx.Graph, kernels: str, *, recorded: bool = False) -> tuple[str, ...]:
    """Sentences that say which implementation will compute the ops with more than one, given a value of `mla.kernels`
    and whether a CUDA graph records the launches. Empty on CPU."""
    return tuple(dict.fromkeys(_sentences(graph, kernels, recorded)))


def packages_for(inputs: Iterable[Any]) -> tuple[str, ...]:
    """The names and versions of the installed packages that may compute ops of a graph with these inputs."""
    if not any(isinstance(t, torch.Tensor) and t.is_cuda for t in inputs):
        return ()
    return versions(tuple(each for op, _ in _OPS.values() for each in op.implementations))


def _sentences(graph: fx.Graph, kernels: str, recorded: bool) -> Iterator[str]:
    for node in graph.nodes:
        if node.target not in _OPS or not node.meta["val"][0].is_cuda:
            continue
        op, bundle = _OPS[node.target]
        x = bundle(*map(_value, node.args), **{name: _value(value) for name, value in node.kwargs.items()})
        choice = foreseen(op, x, present(node.meta["val"][0].device), kernels, recorded=recorded)
        yield f"mla::{op.name}: decided at each call, by its sizes" if choice is None else str(choice)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
