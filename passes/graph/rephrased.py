"""Rephrase what is not written as MLA, but is equal to it: put other code in its place, if that is proved to be MLA.

`sums_of_weights`, `seams`, `looked_up` and `library_products` say what is rephrased, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..algebra.sizes import Unaligned
from ..attention.find import find
from ..code.splicing import emit
from ..masks.meaning import Meaning, understand
from ..mla.heads_apart import together_or_apart
from ..mla.prove import prove
from ..mla.site import Site
from ..nodes.common_subexpressions import CommonSubexpressions
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .input_sizes import take_sizes_from_inputs
from .library_products import library_products_in, may_be_library_product
from .looked_up import looked_up_in, may_be_lookup
from .seams import may_be_seam, seams_in
from .sums_of_weights import distributed_in, may_be_sum

Choose = Callable[[Site, Meaning, Trace], object]
_MAY_BE = (may_be_sum, may_be_seam, may_be_lookup, may_be_library_product)


class Rephrasing(Protocol):
    """Other code for one node of a graph: a function of the values of `sources`."""

    @property
    def place(self) -> fx.Node:
        """The node."""

    @property
    def sources(self) -> Sequence[fx.Node]:
        """The nodes whose values the code takes."""

    def __call__(self, *values: Any) -> Tensor:
        """The code."""

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether `sites`, those of a graph in which the code is the nodes `added`, show that it was worth it."""


def rephrase(module: fx.GraphModule, choose: Choose) -> None:
    """Rephrase what becomes MLA by that, for which `choose` finds paths."""
    if not any(may_be(node) for node in module.graph.nodes for may_be in _MAY_BE):
        return
    found = list(_rephrasings(module.graph))
    if not found:
        return
    copied = fx.Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    tried = fx.GraphModule(module, copied).graph
    of_tried = list(_rephrasings(tried))
    trials = [(each, _put(tried, each)) for each in of_tried]
    _erase_unused(tried, of_tried)
    common = CommonSubexpressions()  # as of keys and values that are looked up alike, of which sites name one
    first = {node: common.first(node) for node in tried.nodes}
    trace = Trace(tried)
    sites = list(_sites(tried, trace, choose))
    for each, (trial, added) in zip(found, trials, strict=True):
        if trial.holds({first.get(node, node) for node in added}, sites):
            _put(module.graph, each)
    _erase_unused(module.graph, found)
    module.recompile()


def _rephrasings(graph: fx.Graph) -> Iterator[Rephrasing]:
    trace = Trace(graph)
    yield from distributed_in(graph, trace)
    yield from seams_in(graph, trace)
    yield from looked_up_in(graph, trace)
    yield from library_products_in(graph)


def _put(graph: fx.Graph, rephrasing: Rephrasing) -> set[fx.Node]:
    """Put the code in its place; returns its nodes. What is unused from now on stays: other rephrasings may read it."""
    place, before = rephrasing.place, set(graph.nodes)
    with graph.inserting_before(place):
        output = emit(graph, rephrasing, rephrasing.sources, place)
    place.replace_all_uses_with(output)
    _tell_sizes_from_before(graph, before)
    take_sizes_from_inputs(graph)
    return {node for node in graph.nodes if node not in before}


def _erase_unused(graph: fx.Graph, rephrasings: Iterable[Rephrasing]) -> None:
    """Erase what is unused where rephrasings begin and end: whatever still reads the weights would need them as
    tensors."""
    unused = list(dict.fromkeys(node for each in rephrasings for node in (each.place, *each.sources)))
    while unused:
        node = unused.pop()
        if node.op == "call_function" and not node.users and not node.is_impure():
            unused = list(dict.fromkeys([*unused, *node.all_input_nodes]))
            graph.erase_node(node)


def _tell_sizes_from_before(graph: fx.Graph, before: set[fx.Node]) -> None:
    """Take sizes from nodes that gave them `before`: to ask the weights for a size would keep the weights alive."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        if node in before:
            known.setdefault(value.node.expr, node)
        elif node.target is torch.ops.aten.sym_size.int and value.node.expr in known:
            node.replace_all_uses_with(known[value.node.expr])
            graph.erase_node(node)


def _sites(graph: fx.Graph, trace: Trace, choose: Choose) -> Iterator[Site]:
    """The sites of a graph for which there are paths."""
    for found in together_or_apart(find(graph, trace), trace):
        if isinstance(found, Refusal):
            continue
        try:
            site = prove(found, trace)
            choose(site, understand(site, trace), trace)
        except (Refusal, Unaligned, GuardOnDataDependentSymNode):
            continue
        yield site
