"""Rewrite a proved site in the graph: trace what it becomes, put that in, and let what it replaced die."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..caches.fp8 import Fp8Keys
from ..caches.pages import Pages
from ..code.splicing import graph_of, inline
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..paths.by_size import EmitBySize
from ..paths.decide import Choice
from ..paths.emit import Emit
from ..paths.opaque import EmitOutput, EmitScores
from .signature import signature


class Rewriter:
    """Rewrites the sites of one graph, after it was traced."""

    def __init__(self, graph: fx.Graph, workspace_tokens: int, environment: ShapeEnv | None) -> None:
        self.graph, self.workspace_tokens, self.environment = graph, workspace_tokens, environment
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._traced: dict[Hashable, fx.Graph] = {}

    def __call__(self, site: Site, meaning: Meaning, choice: Choice, kept: Pages | Fp8Keys | None = None) -> fx.Node:
        """Replace a site by the form that was chosen for it; returns the node that holds the new output.

        With `kept` it reads the site's keys as they are there.

        Raises:
            Unaligned: if the graph does not tell the sizes that this takes; the graph is as it was.
        """
        if site.attention.opaque is not None:
            scores = site.attention.opaque.products[site.nope.of].source
            assert isinstance(scores, fx.Node)
            for place, part in ((scores, EmitScores(site)), (site.node, EmitOutput(site))):
                output = self._put(place, graph_of(part, self._values(part.sources)), part.sources)
            return output
        paths = (choice.path,) if choice.by_size is None else ("absorbed", "chunked")
        parts = [Emit(site, meaning, path, self.workspace_tokens, kept) for path in paths]
        emit = parts[0] if choice.by_size is None else EmitBySize(parts[0], parts[1], choice.by_size)
        key = (
            tuple((p.path, signature(site, p.seen, p.kind, emit.sources, self.environment, kept)) for p in parts),
            tuple(source in self._replaced for source in emit.sources),
        )
        traced = self._traced.get(key)
        if traced is None:
            guards = self._guards()
            traced = graph_of(emit, self._values(emit.sources))
            if self._guards() == guards:  # a new guard speaks of this site's symbols alone
                self._traced[key] = traced
        return self._put(site.node, traced, emit.sources)

    def _values(self, sources: Sequence[fx.Node]) -> list[Any]:
        return [self._replaced.get(node, node).meta["val"] for node in sources]

    def _put(self, place: fx.Node, traced: fx.Graph, sources: Sequence[fx.Node]) -> fx.Node:
        """Replace a node by traced code that takes `sources`."""
        with self.graph.inserting_before(place):
            output = inline(self.graph, traced, [self._replaced.get(node, node) for node in sources], place)
        place.replace_all_uses_with(output)
        self.graph.erase_node(place)  # a sealed attention is impure to fx, so that no pass would remove it
        self._replaced[place] = output
        return output

    def _guards(self) -> int:
        return len(self.environment.guards) if self.environment is not None else 0
