"""Let the code of a site read products through views of them that Dynamo's graph has.

    Dynamo  y = linear(x, w)                                                   [B, S, O]
    ATen    m = mm(view(x, [B S, I]), t(w));  y = view(m, [B, S, O])
    After   what reads m later on, reads view(y, [B S, O])

Of the two, Dynamo's graph has y alone. Code that read m would bring a product of its own, and AOTAutograd would
differentiate both: in each backward two more products of the size of the projection.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from mla_compile.passes.nodes.arguments import RESHAPES, arguments, aten

from .capture import Captured


def read_through_views(captured: Captured) -> None:
    """In the ATen graph, compute what Dynamo's graph lacks from views that it has, for all readers after these."""
    nodes = list(captured.module.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    new: dict[fx.Node, fx.Node] = {}
    """For values that Dynamo's graph lacks, the same computed from a view."""
    for node in reversed(nodes):
        if node in captured.places or not isinstance(node.meta.get("val"), Tensor):
            continue
        for view in node.users:
            source = view if view in captured.places else new.get(view)
            inverse = _inverse(view, node.meta["val"]) if source is not None else None
            if source is None or inverse is None:
                continue
            with captured.module.graph.inserting_after(source):
                new[node] = captured.module.graph.call_function(inverse[0], (source, *inverse[1:]))
            new[node].meta = {**node.meta}
            order[new[node]] = start = order[source]
            node.replace_all_uses_with(new[node], lambda user, start=start: order[user] > start)
            break
    for node in reversed(new.values()):
        if not node.users:
            captured.module.graph.erase_node(node)


def _inverse(view: fx.Node, viewed: Tensor) -> tuple[Any, ...] | None:
    """The op that gives `viewed` back from `view`, and its arguments after the tensor; None if there is none."""
    if view.target in RESHAPES:
        sizes = [size if isinstance(size, int) else -1 for size in viewed.shape]
        return (aten.reshape.default, sizes) if sizes.count(-1) < 2 else None
    if view.target is aten.permute.default:
        dims = [dim % viewed.dim() for dim in arguments(view)[1]]
        return aten.permute.default, [dims.index(i) for i in range(len(dims))]
    return (view.target, *arguments(view)[1:]) if view.target in (aten.t.default, aten.transpose.int) else None
