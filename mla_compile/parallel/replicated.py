"""Note in the report which sites have all heads on every rank while other weights are split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput

from mla_compile.passes.nodes.walk import makers, walk
from mla_compile.passes.outcome import SITE, WEIGHT, Outcome


def with_replicated_heads(
    outcomes: tuple[Outcome, ...], module: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Outcome, ...]:
    """The outcomes of a rewritten ATen graph, with a remark on each whose up-projection is whole while other weights of
    the graph are split over a mesh dimension named `tp` (or without a name). `inputs` are those of the Dynamo graph.
    """
    size = max((_ranks(value) for value in inputs), default=1)
    if size == 1:
        return outcomes
    nodes = {node.name: node for node in module.graph.nodes}
    weights = {node.meta[SITE]: node.meta[WEIGHT] for node in nodes.values() if WEIGHT in node.meta}
    words = f"; N replicated over tp={size}"
    return tuple(
        replace(outcome, reason=outcome.reason + words)
        if outcome.node in weights and _is_whole(nodes[weights[outcome.node]], inputs)
        else outcome
        for outcome in outcomes
    )


def _is_whole(weight: fx.Node, inputs: Sequence[Any]) -> bool:
    return all(_ranks(value) == 1 for value in _made_of(weight, inputs))


def _made_of(node: fx.Node, inputs: Sequence[Any]) -> Iterator[Any]:
    """The inputs of the Dynamo graph from which an ATen node is computed; where it uses local shards, the DTensors."""
    for maker in walk([node], makers):
        origin = maker.meta.get("desc")
        if isinstance(origin, SubclassGetAttrAOTInput):
            origin = origin.base
        if isinstance(origin, PlainAOTInput):
            yield inputs[origin.idx]


def _ranks(value: Any) -> int:
    """The number of tensor-parallel ranks over which a tensor is split."""
    mesh = getattr(value, "device_mesh", None)  # only a DTensor has one
    if mesh is None:
        return 1
    names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
    sizes = [mesh.size(i) for i, p in enumerate(value.placements) if names[i] == "tp" and not p.is_replicate()]
    return max(sizes, default=1)
