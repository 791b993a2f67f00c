"""Compute an indexer's scores without the products of single heads.

Before   scores[b, s, t] = sum_h weight[b, s, h] relu(scale * q[b, s, h] . k[b, t])        H times as many products
After    scores = mla::index_scores(q, k, scale * weight)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from mla_compile.ops import index_scores

from ..algebra.operations import term_of
from ..algebra.sizes import Unaligned
from ..algebra.terms import Axis, Dim, Product, Read, Term
from ..attention.pieces import PRODUCTS
from ..code.reading import Reader, sources_of, wide, write_as
from ..code.splicing import emit
from ..nodes.arguments import arguments, aten, is_tensor
from ..trace.trace import Trace

_NARROW = (torch.bfloat16, torch.float16)
_POSITIVE = (aten.relu.default, aten.clamp_min.default, aten.clamp.default)
_SUMMED = (*PRODUCTS, aten.sum.dim_IntList)
_CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable)
_STEPS = 12
"""How far behind the scores the choice may lie: masks and views in between."""


@dataclass(frozen=True)
class IndexScores:
    """Scores that `place`, a product or a sum, sums over heads."""

    place: fx.Node
    query: Read
    key: Read
    weight: Read
    scale: float
    batch: Dim
    queries: Dim
    heads: Dim
    width: Dim
    keys: Dim
    dims: tuple[Dim, ...]
    """Of `place`."""
    sources: tuple[fx.Node, ...]

    def __call__(self, *values: Tensor | int) -> Tensor:
        """The scores, with the dimensions of `place`."""
        read = Reader(self.sources, values)
        q = read(self.query, self.batch, self.queries, self.heads, self.width)
        k = read(self.key, self.batch, self.keys, self.width)
        weight = wide(read(self.weight, self.batch, self.queries, self.heads)) * self.scale
        scores = index_scores(q, k, weight)
        return write_as(scores, (self.batch, self.queries, self.keys), self.dims, read.realize)


def sum_index_scores(graph: fx.Graph) -> bool:
    """Replace the scores of a graph's indexers on a CPU; returns whether there are any."""
    if not {*_CHOICES} & {node.target for node in graph.nodes} or not any(map(_is_relu, graph.nodes)):
        return False
    all_found = list(_found(graph, Trace(graph)))
    for found in all_found:
        with graph.inserting_before(found.place):
            output = emit(graph, found, found.sources, found.place)
        found.place.replace_all_uses_with(output)
        graph.erase_node(found.place)
    if all_found:
        graph.eliminate_dead_code()
    return bool(all_found)


def _found(graph: fx.Graph, trace: Trace) -> Iterator[IndexScores]:
    for node in graph.nodes:
        if node.target not in _SUMMED or node.meta["val"].dtype != torch.float32 or not node.meta["val"].is_cpu:
            continue
        with contextlib.suppress(Unaligned, GuardOnDataDependentSymNode):
            scores = _scores_of(node, trace)
            if scores is not None:
                yield scores


def _scores_of(node: fx.Node, trace: Trace) -> IndexScores | None:
    """What a product or a sum sums, if it is weighted products of heads.

    Raises: Unaligned, if these have no axes in common with the result, or the graph does not tell their sizes.
    """
    form = trace[node]
    whole = form.term.parts
    if not isinstance(whole, Product) or form.term.read.source is not node or not _is_chosen_from(node):
        return None
    for weight, positive in ((whole.left, whole.right), (whole.right, whole.left)):
        found = _products_behind(positive.read, trace)
        if found is None:
            continue
        inner, factor = found[0].parts, found[1]
        assert isinstance(inner, Product)
        if inner.scale <= 0:
            return None
        for query, key in ((inner.left, inner.right), (inner.right, inner.left)):
            axes = _axes(query, key, weight, whole.summed, inner.summed, form.dims)
            if axes is None:
                continue
            reads, scale = _exact(query.read, key.read), factor * inner.scale * whole.scale
            sources = sources_of([*reads, weight.read], node, [*axes, *form.dims])
            return IndexScores(node, *reads, weight.read, scale, *axes, form.dims, tuple(sources))
    return None


def _is_relu(node: fx.Node) -> bool:
    return node.target in _POSITIVE and is_tensor(node) and [*arguments(node)[1:]] in ([], [0], [0, None])


def _is_chosen_from(node: fx.Node) -> bool:
    """Whether the greatest of some numbers are taken: the output of a layer with a ReLU may be the same sum."""
    behind = {node}
    for _ in range(_STEPS):
        behind = {user for before in behind for user in before.users}
        if any(user.target in _CHOICES for user in behind):
            return True
    return False


def _products_behind(read: Read, trace: Trace) -> tuple[Term, float] | None:
    """The products of which `read` is the positive part, and a number that this is multiplied by, if nothing else reads
    them."""
    source, factor = read.source, math.prod(read.factors)
    while isinstance(source, fx.Node) and len(source.users) == 1 and source.target is aten.mul.Tensor:
        source, number = arguments(source)
        if not isinstance(number, float | int):
            return None
        factor *= number
    if not isinstance(source, fx.Node) or not _is_relu(source) or len(source.users) != 1:
        return None
    if source.meta["val"].dtype != torch.float32 or any(not isinstance(step, float) for step in read.then):
        return None
    products = term_of(trace[arguments(source)[0]], replace(read, source=source, then=()))
    computed = products.read.source
    if not isinstance(products.parts, Product) or not isinstance(computed, fx.Node):
        return None
    return (products, factor) if computed.meta["val"].dtype == torch.float32 else None


def _axes(
    query: Term, key: Term, weight: Term, heads: Dim, width: Dim, dims: tuple[Dim, ...]
) -> tuple[Dim, Dim, Dim, Dim, Dim] | None:
    """The axes of sequences, queries, heads, columns and keys; None if the operands have others."""
    own = {*heads, *width}
    together = [axis for dim in dims for axis in dim]
    batch = tuple(axis for axis in together if axis in query.axes and axis in key.axes)
    queries = tuple(axis for axis in together if axis in query.axes and axis not in batch)
    keys = tuple(axis for axis in together if axis in key.axes and axis not in batch)
    of_queries = {*batch, *queries}

    def has(term: Term, *axes: Axis) -> bool:
        return term.axes == {*axes}

    fits = (
        bool(heads and keys and width)
        and not own & {*together}
        and len(together) == len(batch) + len(queries) + len(keys)
        and has(query, *of_queries, *heads, *width)
        and has(key, *batch, *keys, *width)
        and {*heads} <= weight.axes <= {*of_queries, *heads}
    )
    return (batch, queries, heads, width, keys) if fits else None


def _exact(query: Read, key: Read) -> tuple[Read, Read]:
    """Without casts to float32 of numbers of the same narrower dtype: their products in float32 are exact."""
    sources = query.source, key.source
    dtypes = {source.meta["val"].dtype if isinstance(source, fx.Node) else None for source in sources}
    widened = all(read.then == (torch.float32,) for read in (query, key))
    if widened and len(dtypes) == 1 and dtypes <= {*_NARROW}:
        return replace(query, then=()), replace(key, then=())
    return query, key
