"""Rewrite a proved site in the graph: trace its new code and put it in. What it replaces is dead code from then on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..code.splicing import graph_of, inline
from ..mla.site import Site
from ..paths.either import Either
from ..paths.path import Code
from ..paths.plan import Plan
from .signature import signature


class Rewriter:
    """Rewrites the sites of one graph, once the graph is traced."""

    def __init__(self, graph: fx.Graph, workspace_tokens: int, environment: ShapeEnv | None) -> None:
        self.graph, self.workspace_tokens, self.environment = graph, workspace_tokens, environment
        self.replaced: dict[fx.Node, fx.Node] = {}
        """The nodes that were replaced, with what replaced them."""
        self._traced: dict[Hashable, fx.Graph] = {}

    def __call__(self, site: Site, plan: Plan | Either) -> fx.Node:
        """Replace a site by what it becomes; returns the node that holds the output.

        Raises:
            Unaligned: if the graph does not tell the sizes that this takes. The graph is then unchanged.
        """
        output = site.node
        for part in plan.parts(site, self.workspace_tokens):
            if part.place in self.replaced:  # scores that two attentions share
                output = self.replaced[part.place]
                continue
            output = self._put(part.place, self._graph_of(site, part.code), part.code.sources)
        for head in site.attention.heads_apart:
            self._remove(head.node)
        return output

    def _remove(self, node: fx.Node) -> None:
        """Remove a node if nothing reads it any more, nor views of it."""
        for view in list(node.users):
            self._remove(view)
        if not node.users:
            self.graph.erase_node(node)

    def _graph_of(self, site: Site, code: Code) -> fx.Graph:
        """The graph of code; that of an earlier site if their code is the same."""
        if code.said is None:
            return graph_of(code, self._values(code.sources))
        key = (
            signature(site, code.said, code.sources, self.environment),
            tuple(source in self.replaced for source in code.sources),
        )
        traced = self._traced.get(key)
        if traced is None:
            guards = self._guards()
            traced = graph_of(code, self._values(code.sources))
            if self._guards() == guards:  # a new guard is about this site's symbols alone
                self._traced[key] = traced
        return traced

    def _values(self, sources: Sequence[fx.Node]) -> list[Any]:
        return [self.replaced.get(node, node).meta["val"] for node in sources]

    def _put(self, place: fx.Node, traced: fx.Graph, sources: Sequence[fx.Node]) -> fx.Node:
        """Replace a node by traced code that takes `sources`."""
        with self.graph.inserting_before(place):
            output = inline(self.graph, traced, [self.replaced.get(node, node) for node in sources], place)
        place.replace_all_uses_with(output)
        self.graph.erase_node(place)  # fx takes a sealed attention to be impure, so no pass would remove it
        self.replaced[place] = output
        return output

    def _guards(self) -> int:
        return len(self.environment.guards) if self.environment is not None else 0
