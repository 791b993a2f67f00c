"""Write each part of a row by itself, so that the kernel that computes a part also writes it.

Before   index_put(pages, [page, row], cat([latent, k_rope], -1))
After    index_put(index_put(pages, [page, row, columns of the latent], latent), [page, row, the others], k_rope)

The norm of the latent and the rotation of the rope key become separate kernels, and neither can be fused with a write
of both: Inductor would store their results and then copy these to the row. Likewise for rows that are joined and at
once split again, to be quantised:

Before   split_with_sizes(cat([latent, k_rope], -1), [L, R], -1)
After    latent, k_rope
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table

from mla_compile.passes.code.splicing import emit
from mla_compile.passes.nodes.arguments import INTEGERS, argument, arguments, aten

_RESHAPED = (aten.view.default, aten.reshape.default)
_DROPPED = (aten.select.int, aten.squeeze.dim)


def write_in_parts(graph: fx.Graph) -> bool:
    """Write the parts of joined rows separately, and return whether there were any."""
    changed = False
    for node in list(graph.nodes):
        if node.target is aten.split_with_sizes.default:
            changed |= _leave_apart(graph, node)
        elif node.target is aten.index_put.default:
            changed |= _write_apart(graph, node)
    graph.eliminate_dead_code()
    return changed


def _leave_apart(graph: fx.Graph, split: fx.Node) -> bool:
    values, sizes = arguments(split)[:2]
    way = _way_from_cat(values)
    if way is None or argument(split, "dim") % values.meta["val"].dim() != values.meta["val"].dim() - 1:
        return False
    cat, *views = way
    parts = arguments(cat)[0]
    if [part.meta["val"].shape[-1] for part in parts] != list(sizes):
        return False

    def code(part: Tensor) -> Tensor:
        return _viewed(part, views)

    for user in list(split.users):
        assert user.target is operator.getitem
        _replace(graph, user, [parts[arguments(user)[1]]], code)
    return True


def _write_apart(graph: fx.Graph, write: fx.Node) -> bool:
    target, places, values = arguments(write)[:3]
    tensor = target.meta["val"]
    if argument(write, "accumulate") or len(places) != tensor.dim() - 1 or not all(map(_is_index, places)):
        return False
    way = _way_from_cat(values)
    if way is None or values.meta["val"].dtype != tensor.dtype or values.meta["val"].shape[-1] != tensor.shape[-1]:
        return False
    cat, *views = way

    def code(target: Tensor, *more: Tensor) -> Tensor:
        rows = [place.unsqueeze(-1) for place in more[: len(places)]]
        first = 0
        for part in more[len(places) :]:
            columns = torch.arange(first, first + part.shape[-1], device=target.device)
            first += part.shape[-1]
            target = target.index_put((*rows, columns), _viewed(part, views))
        return target

    _replace(graph, write, [target, *places, *arguments(cat)[0]], code)
    return True


def _way_from_cat(values: fx.Node) -> list[fx.Node] | None:
    """The `cat` of columns behind `values`, and the views from it to `values`, all of known sizes; else None."""
    way = [values]
    while way[0].target in (*_RESHAPED, *_DROPPED):
        way.insert(0, arguments(way[0])[0])
    cat = way[0]
    if cat.target is not aten.cat.default:
        return None
    parts = arguments(cat)[0]
    last, count = cat.meta["val"].dim() - 1, cat.meta["val"].shape[-1]
    if argument(cat, "dim") % (last + 1) != last or not all(map(_is_known, parts)):
        return None
    if any(part.meta["val"].dtype != cat.meta["val"].dtype or part.meta["val"].dim() <= last for part in parts):
        return None
    # A view that keeps the number of columns keeps the columns.
    return way if all(len(node.users) == 1 and _has_columns(node, count) for node in way) else None


def _has_columns(node: fx.Node, count: int) -> bool:
    value = node.meta["val"]
    if node.target in _DROPPED and arguments(node)[1] % (value.dim() + 1) == value.dim():
        return False
    return value.dim() > 0 and _is_known(node) and value.shape[-1] == count


def _is_index(place: fx.Node | None) -> bool:
    return place is not None and _is_known(place) and place.meta["val"].dtype in INTEGERS


def _is_known(node: fx.Node) -> bool:
    """Whether all sizes of a node are numbers."""
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _viewed(part: Tensor, views: Sequence[fx.Node]) -> Tensor:
    """Apply to some of the columns the views that are applied to all of them."""
    for view in views:
        if view.target in _RESHAPED:
            part = part.reshape(*view.meta["val"].shape[:-1], part.shape[-1])
        else:
            drop: Any = view.target
            part = drop(part, *arguments(view)[1:])
    return part


def _replace(graph: fx.Graph, node: fx.Node, sources: list[fx.Node], code: Callable[..., Any]) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(emit(graph, code, sources, node, select_decomp_table()))
    graph.erase_node(node)
