"""The passes in order: find, prove, decide, rewrite. Graph in, graph out, and what became of each attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from mla_compile.cost import Device

from .algebra.sizes import Unaligned
from .attention.find import Attention, find
from .graph.guards import GuardNeeded, no_guards
from .graph.in_place import write_in_place
from .graph.rewriter import Rewriter
from .masks.meaning import understand
from .mla.prove import prove
from .mla.site import Site
from .nodes.arguments import aten
from .nodes.refusal import Refusal
from .nodes.source import common_frame
from .outcome import Outcome, rewritten, unchanged
from .paths.all import AUTO
from .paths.choose import Chooser, Ranges
from .trace.trace import Trace


@dataclass(frozen=True)
class Pipeline:
    """The passes with their settings."""

    device: Device
    """Whose rates the cost model uses."""

    path: str = AUTO
    """`auto` asks the cost model; the word of a path takes that one at every site that it is a path of."""

    workspace_tokens: int = 1024
    """Keys that the chunked path up-projects at a time."""

    ranges: Ranges | None = None
    """Of an exported program: the sizes it is declared for, all of which its one graph has to serve without guards."""

    def __call__(self, module: fx.GraphModule) -> list[Outcome]:
        """Rewrite the MLA sites of a functional ATen graph in place. Every node has its fake value in `meta["val"]`."""
        graph = module.graph
        mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        environment = mode.shape_env if mode is not None else None
        with nullcontext() if self.ranges is None else no_guards(environment):
            outcomes = self._rewrite_all(module, environment)
        if any(o.rewritten for o in outcomes):
            write_in_place(graph)
            graph.eliminate_dead_code()
            _relax_views(graph)
            graph.lint()
            module.recompile()
        return outcomes

    def _rewrite_all(self, module: fx.GraphModule, environment: ShapeEnv | None) -> list[Outcome]:
        graph = module.graph
        outcomes: list[Outcome] = []
        choose = Chooser(self.path, self.device, self.workspace_tokens, environment, self.ranges)
        rewriter = Rewriter(graph, self.workspace_tokens, environment)
        trace = Trace(graph)
        for found in list(find(graph, trace)):
            try:
                outcomes.append(self._rewrite(found, trace, choose, rewriter))
            except Refusal as refusal:
                outcomes.append(unchanged(found.node, refusal))
            except Unaligned as error:
                reason = f"expected sizes that factor into common axes, found that {error}"
                outcomes.append(unchanged(found.node, Refusal(found.node, reason)))
            except GuardNeeded as guard:
                reason = f"expected code for all declared sizes, found some for {guard} alone"
                outcomes.append(unchanged(found.node, Refusal(found.node, reason)))
            except GuardOnDataDependentSymNode as error:
                reason = f"expected sizes of which enough is known before a run, found {error.cond}"
                outcomes.append(unchanged(found.node, Refusal(found.node, reason)))
        return outcomes

    def _rewrite(self, found: Attention | Refusal, trace: Trace, choose: Chooser, rewriter: Rewriter) -> Outcome:
        if isinstance(found, Refusal):
            raise found
        site = prove(found, trace)
        meaning = understand(site, trace)
        choice = choose(site, meaning, trace)
        frame = common_frame(site.node, _sources(site))
        output = rewriter(site, choice.form)
        output.meta["mla_site"] = site.node.name
        if site.w_uv is not None and isinstance(site.w_uv.source, fx.Node):
            output.meta["mla_weight"] = site.w_uv.source.name
        shapes = {name: str(size) for name, size in site.sizes.items()}
        return rewritten(site.node, frame, choice.word, choice.reason, shapes, choice.guards, meaning.words)


def _sources(site: Site) -> list[fx.Node]:
    """The nodes of a site that stand in the user's module rather than in what it calls."""
    reads = [site.latent, *(rope.key.read for rope in site.ropes)]
    return [read.source for read in reads if isinstance(read.source, fx.Node)]


def _relax_views(graph: fx.Graph) -> None:
    """A view of a rewritten output may need a copy where one of the original did not: its strides can differ."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
