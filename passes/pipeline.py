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
from .caches.pages import kept_keys
from .graph.guards import GuardNeeded, no_guards
from .graph.in_place import write_in_place
from .graph.rewriter import Rewriter
from .masks.meaning import Meaning, understand
from .mla.prove import prove
from .mla.site import Site
from .nodes.arguments import aten
from .nodes.refusal import Refusal
from .nodes.source import common_frame
from .outcome import Outcome, rewritten, unchanged
from .paths.decide import Ranges, decide
from .trace.trace import Trace


@dataclass(frozen=True)
class Result:
    """What became of one attention, and what was proved of it, also where it came no further than that."""

    outcome: Outcome
    site: Site | None
    """Of the graph as it was."""
    meaning: Meaning | None
    environment: ShapeEnv | None
    """Of the symbols of its sizes."""


@dataclass(frozen=True)
class Pipeline:
    """The passes with their settings."""

    device: Device
    """Whose rates the cost model uses."""

    path: str = "auto"
    """`auto` asks the cost model; `absorbed` or `chunked` take that path at every site, `sparse` where it is one."""

    workspace_tokens: int = 1024
    """Keys that the chunked path up-projects at a time."""

    ranges: Ranges | None = None
    """Of an exported program: the sizes it is declared for, all of which its one graph has to serve without guards."""

    def __call__(self, module: fx.GraphModule) -> list[Result]:
        """Rewrite the MLA sites of a functional ATen graph in place. Every node has its fake value in `meta["val"]`."""
        graph = module.graph
        mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        environment = mode.shape_env if mode is not None else None
        rewriter = Rewriter(graph, self.workspace_tokens, environment)
        trace = Trace(graph)
        with nullcontext() if self.ranges is None else no_guards(environment):
            results = [self._treat(found, trace, rewriter, environment) for found in list(find(graph, trace))]
        if any(result.outcome.rewritten for result in results):
            write_in_place(graph)
            graph.eliminate_dead_code()
            _relax_views(graph)
            graph.lint()
            module.recompile()
        return results

    def _treat(
        self, found: Attention | Refusal, trace: Trace, rewriter: Rewriter, environment: ShapeEnv | None
    ) -> Result:
        site, meaning = None, None
        try:
            if isinstance(found, Refusal):
                raise found
            site = prove(found, trace)
            meaning = understand(site, trace)
            outcome = self._rewrite(site, meaning, trace, rewriter, environment)
        except (Refusal, Unaligned, GuardNeeded, GuardOnDataDependentSymNode) as error:
            outcome = unchanged(found.node, _refusal(found.node, error))
        return Result(outcome, site, meaning, environment)

    def _rewrite(
        self, site: Site, meaning: Meaning, trace: Trace, rewriter: Rewriter, environment: ShapeEnv | None
    ) -> Outcome:
        choice = decide(site, meaning, self.path, self.device, self.workspace_tokens, environment, self.ranges)
        frame = common_frame(site.node, _sources(site))
        kept, words = kept_keys(site, meaning, choice.path, trace)
        output = rewriter(site, meaning, choice, kept)
        output.meta["mla_site"] = site.node.name
        shapes = {name: str(size) for name, size in site.sizes.items()}
        return rewritten(site.node, frame, choice.path, choice.reason + words, shapes, choice.guards, meaning.words)


def _refusal(node: fx.Node, error: Exception) -> Refusal:
    """Why the attention at `node` stays as it is."""
    match error:
        case Refusal():
            return error
        case Unaligned():
            reason = f"expected sizes that factor into common axes, found that {error}"
        case GuardNeeded():
            reason = f"expected code for all declared sizes, found some for {error} alone"
        case _:
            reason = f"expected sizes of which enough is known before a run, found {getattr(error, 'cond', error)}"
    return Refusal(node, reason)


def _sources(site: Site) -> list[fx.Node]:
    """The nodes of a site that stand in the user's module rather than in what it calls."""
    reads = [site.latent, *(rope.key.read for rope in site.ropes)]
    return [read.source for read in reads if isinstance(read.source, fx.Node)]


def _relax_views(graph: fx.Graph) -> None:
    """A view of a rewritten output may need a copy where one of the original did not: its strides can differ."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
