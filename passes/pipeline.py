"""The pipeline: take each attention of a graph through the `STEPS`, and rewrite the graph in place."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from mla_compile.cost import Device

from .algebra.sizes import Unaligned
from .algebra.terms import Joined, Product, Read, Scaled, Sum, Term
from .attention.attention import Attention
from .attention.find import find
from .attention.pieces import PRODUCTS
from .caches.grown import copying
from .graph.gathers import remove_unused, waits_for_gathers
from .graph.in_place import write_in_place
from .graph.input_sizes import take_sizes_from_inputs
from .graph.overwritten import drop_overwritten
from .graph.rephrased import rephrase
from .graph.rewriter import Rewriter
from .graph.strides import keep_strides
from .masks.given import given_mask
from .masks.meaning import Meaning, understand
from .mla.heads_apart import together_or_apart
from .mla.nearest import with_nearest_queries
from .mla.queries import query_latent
from .mla.site import Site
from .mla.values_alone import prove_or_values_alone
from .nodes.arguments import aten
from .nodes.guards import GuardNeeded, no_guards
from .nodes.refusal import Refusal
from .nodes.source import common_frame
from .outcome import QUERY_LATENT, SITE, UP_PROJECTIONS, WEIGHT, Outcome, rewritten, unchanged
from .paths.agreement import NO_AGREEMENT, Agreement
from .paths.all import AUTO
from .paths.choose import Choice, Chooser, Ranges
from .trace.trace import Trace

STEPS = ("find", "prove", "understand", "choose", "rewrite")
"""The steps of one attention: find its products and its softmax, prove its latent, understand its masks, choose
its path, and put in the code of that path."""


@dataclass
class Result:
    """The outcome of one attention, and what was proved about it before a step refused it, if one did."""

    node: fx.Node
    """Its node in the graph as it was before the rewrite."""
    found: Attention | None = None
    site: Site | None = None
    meaning: Meaning | None = None
    choice: Choice | None = None
    outcome: Outcome = field(init=False)
    environment: ShapeEnv | None = None
    """The shape environment of the symbols in its sizes."""

    @property
    def stopped(self) -> str | None:
        """The step that refused the attention; None if it is rewritten."""
        if self.outcome.rewritten:
            return None
        known = (self.found, self.site, self.meaning, self.choice)
        return STEPS[next((i for i, what in enumerate(known) if what is None), len(known))]


@dataclass(frozen=True)
class Pipeline:
    """The passes with their settings."""

    device: Device
    """The device whose rates the cost model uses."""

    path: str = AUTO
    """`auto` asks the cost model; the word of a path takes that path at every site to which it applies."""

    workspace_tokens: int = 1024
    """Keys that the chunked path up-projects at a time."""

    ranges: Ranges | None = None
    """For an exported program, the sizes it is declared for: its one graph has to serve all of them without guards."""

    training: bool = False
    """Whether the graph needs gradients. Its rewritten code is then put into another graph, which torch
    differentiates; this graph itself is not run."""

    agreement: Agreement = NO_AGREEMENT
    """What the ranks agree on where a group of them shares out the keys."""

    def __call__(self, module: fx.GraphModule) -> list[Result]:
        """Rewrite the MLA sites of a functional ATen graph, which may have been rephrased, in place.

        Every node has its fake value in `meta["val"]`.
        """
        graph, choose = module.graph, self._chooser(module)
        rewriter = Rewriter(graph, self.workspace_tokens, choose.environment)
        trace = Trace(graph)
        waits = waits_for_gathers(graph)
        with self._guards(choose):
            found = list(together_or_apart(find(graph, trace), trace))
            tried = [self._treat(each, trace, choose, rewriter) for each in found]
        results = [result for result in tried if result.outcome.rewritten or not _mixes_inputs(result.found)]
        if any(result.outcome.rewritten for result in results):
            take_sizes_from_inputs(graph)
            if not self.training:
                write_in_place(graph)
                graph.eliminate_dead_code()
                if waits:
                    remove_unused(waits)
                    graph.eliminate_dead_code()
                drop_overwritten(graph, rewriter.replaced)
            _relax_views(graph)
            if not self.training:
                with self._guards(choose):
                    keep_strides(graph, rewriter.replaced)
            graph.lint()
            module.recompile()
        return results

    def rephrase(self, module: fx.GraphModule) -> None:
        """Rephrase as attention, in place, computations that are not written as attention and could then be
        rewritten (see `graph/rephrased`)."""
        if not self.training and self.ranges is None:
            rephrase(module, self._chooser(module))

    def _guards(self, choose: Chooser) -> AbstractContextManager[None]:
        """A context in which an exported program takes no guards."""
        return nullcontext() if self.ranges is None else no_guards(choose.environment)

    def _chooser(self, module: fx.GraphModule) -> Chooser:
        mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
        return Chooser(
            self.path,
            self.device,
            self.workspace_tokens,
            mode.shape_env if mode is not None else None,
            self.ranges,
            training=self.training,
            agreement=self.agreement,
        )

    def _proved(self, found: Attention, trace: Trace, choose: Chooser) -> Site:
        site = prove_or_values_alone(found, trace)
        if site.unproved_keys is not None:
            choose.where_values_pay(site)  # before masks are understood, since most attentions are not MLA
        return site

    def _treat(self, found: Attention | Refusal, trace: Trace, choose: Chooser, rewriter: Rewriter) -> Result:
        result = Result(found.node, environment=choose.environment)
        try:
            if isinstance(found, Refusal):
                raise found
            result.found = found
            site = self._proved(found, trace, choose)
            result.site = site if self.training else with_nearest_queries(site)
            result.meaning = understand(result.site, trace)
            result.choice = choose(result.site, result.meaning, trace)
            taken = result.choice.plan.as_taken(result.site)
            if taken is not result.site:
                result.meaning = understand(taken, trace)
            output = rewriter(taken, result.choice.plan)
        except (Refusal, Unaligned, GuardNeeded, GuardOnDataDependentSymNode) as error:
            result.outcome = unchanged(found.node, _refusal(found.node, error))
            return result
        result.outcome = _rewritten(result.site, result.meaning, result.choice)
        output.meta[SITE] = result.site.node.name
        if self.training and (latent := query_latent(taken, trace)) is not None:
            output.meta[QUERY_LATENT] = latent.name
        if output is result.site.node:
            output.meta[UP_PROJECTIONS] = _ends_of_up_projections(taken)
        w_uv = result.site.w_uv
        if w_uv is not None and isinstance(w_uv.source, fx.Node):
            output.meta[WEIGHT] = w_uv.source.name
        return result


def unknown_strides(result: Result) -> Result:
    """The same attention, unchanged because it is in a branch or loop body whose results have no layout to keep."""
    refusal = Refusal(
        result.node,
        "expected results of a branch or loop body whose strides are known, found strides that are symbols beside a "
        "dimension of one element",
        "return a contiguous tensor from it",
    )
    result.outcome = unchanged(result.node, refusal)
    return result


def _ends_of_up_projections(site: Site) -> tuple[list[str | None], list[str]]:
    """The names of the latents, None where the graph has none, and of the products of queries and keys."""
    opaque, second = site.attention.opaque, site.second_latent
    latents = [site.latent.read, *([second.latent.read] if second is not None else [])]
    sources = [source for latent in latents for source in _unscaled(latent)]
    names = [source.name if isinstance(source, fx.Node) else None for source in sources]
    products = [product.source for product in opaque.products] if opaque is not None else []
    return names, [product.name for product in products if isinstance(product, fx.Node)]


def _mixes_inputs(found: Attention | None) -> bool:
    """Whether an attention is to inputs of the graph that no sequence or head has for itself: a router's, which mixes
    the weights of experts, looks like this."""
    if found is None or found.node.target not in PRODUCTS:
        return False
    operands = *_mixed(found.value, found), *(score.key for score in found.scores)
    sources = [operand.read.source for operand in operands]
    given = all(isinstance(source, fx.Node) and source.op in ("placeholder", "get_attr") for source in sources)
    return given and not any(operand.axes & {*found.rows} for operand in operands)


def _mixed(value: Term, found: Attention) -> Iterator[Term]:
    """What an attention mixes: its values, or the matrices by which each row is multiplied to get them,
    `sum_e p[r, e] (sum_l c[r, l] E[e, l, d]) = sum_l c[r, l] (sum_e p[r, e] E[e, l, d])`.

    In an up-projection of tokens it is the other factor, the latent, that has the keys, and it has no columns.
    """
    match value.parts:
        case Sum(terms):
            for term in terms:
                yield from _mixed(term, found)
        case Product(left, right) if found.columns:
            matrices = [
                factor
                for factor, row in ((left, right), (right, left))
                if {*found.columns} <= factor.axes and not row.axes & {*found.keys, *found.columns}
            ]
            yield from matrices or [value]
        case _:
            yield value


def _unscaled(latent: Read) -> Iterator[Hashable]:
    """What a latent is, or its pieces are, without scalings, which are computed again with the keys and values."""
    match latent.source:
        case Scaled(of):
            yield from _unscaled(of)
        case Joined(pieces):
            for piece in pieces:
                yield from _unscaled(piece)
        case source:
            yield source


def _rewritten(site: Site, meaning: Meaning, choice: Choice) -> Outcome:
    frame = common_frame(site.node, _sources(site))
    shapes = {name: str(size) for name, size in site.sizes.items()}
    absorbing = "" if site.unproved_keys is None else f"to have keys absorbed too, {site.unproved_keys.remedy}"
    hint = "; ".join(filter(None, (copying(site), given_mask(site, meaning), absorbing)))
    return rewritten(site.node, frame, choice.word, choice.reason, shapes, choice.guards, meaning.words, hint)


def _refusal(node: fx.Node, error: Exception) -> Refusal:
    """Why the attention at `node` stays as it is."""
    match error:
        case Refusal():
            return error
        case Unaligned():
            reason = f"expected sizes that factor into common axes, found: {error}"
        case GuardNeeded():
            reason = f"expected code that is right for all declared sizes, found code that needs {error}"
        case _:
            reason = f"expected sizes that are known well enough before a run, found {getattr(error, 'cond', error)}"
    return Refusal(node, reason)


def _sources(site: Site) -> list[fx.Node]:
    """The nodes that hold a site's latent and rope keys: the user's module makes them, not a function that it calls."""
    reads = [site.latent.read, *(rope.key.read for rope in site.ropes)]
    return [read.source for read in reads if isinstance(read.source, fx.Node)]


def _relax_views(graph: fx.Graph) -> None:
    """Turn views into reshapes: the strides of a rewritten output can differ, so that viewing it may take a copy."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
