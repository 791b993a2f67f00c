"""Run the passes on a Dynamo graph that needs gradients: its attention becomes ops that torch can differentiate.

    Dynamo graph -> functional ATen graph, without gradients -> passes -> rewritten code, put into the Dynamo graph

The rest of the Dynamo graph and its inputs stay as they are, and AOTAutograd differentiates the graph as usual. The
body of an activation checkpoint is a graph of its own and is treated like one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.asked import told
from mla_compile.cost import Device
from mla_compile.dynamo.graph import copied
from mla_compile.dynamo.regions import is_checkpoint
from mla_compile.options import KEEP_ALL, QUERIES, Options
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.outcome import UP_PROJECTIONS, Outcome, output_of, unchanged
from mla_compile.rewriting import rewrite_graph
from mla_compile.verify import Check, check

from .capture import Captured, NotCaptured, capture
from .recompute import recompute_keys_and_values, recompute_operands, recompute_queries
from .splice import splice
from .through_views import read_through_views
from .verified import check_of_parts


@dataclass(frozen=True)
class Trained:
    """A Dynamo graph after the passes."""

    module: fx.GraphModule
    outcomes: tuple[Outcome, ...]
    """The outcome of every attention, in order: those of the graph, then those of its checkpoints."""
    notes: tuple[str, ...]
    """Why graphs could not be captured."""
    seconds: float
    """Wall time of the passes, without tracing."""
    checks: tuple[Check, ...]
    """The checks for `mla.verify`; empty without it."""


def rewrite_for_training(
    module: fx.GraphModule, device: Device, options: Options, *, checkpointed: bool = False
) -> Trained:
    """A copy of a Dynamo graph whose MLA sites are differentiable ops; the graph itself stays as it is.

    `checkpointed` says that it is the body of a checkpoint, which is recomputed as a whole.
    """
    new = copied(module)
    try:
        captured = capture(new)
    except NotCaptured as error:
        return Trained(new, (), (str(error),), 0.0, ())
    sites = {node.name: node for node in captured.origins}
    rewriting = rewrite_graph(captured.module, device, options, training=True)
    for outcome in rewriting.outcomes:
        _move_origins(captured, outcome, sites)
    captured.share_origins()
    read_through_views(captured)
    outcomes = tuple(_spliced(captured, outcome, options.recompute, checkpointed) for outcome in rewriting.outcomes)
    own: Check | None = None
    if rewriting.original is not None and any(outcome.rewritten for outcome in outcomes):
        own = functools.partial(check, rewriting.original, captured.module, outcomes)
    trained = Trained(new, outcomes, (), rewriting.seconds, ())
    of_checkpoints: dict[str, tuple[Check, ...]] = {}
    for name in _checkpoints(new):
        written = new.get_submodule(name)
        assert isinstance(written, fx.GraphModule)
        body = rewrite_for_training(written, device, replace(options, recompute=KEEP_ALL), checkpointed=True)
        setattr(new, name, body.module)
        of_checkpoints[name] = body.checks
        trained = replace(
            trained,
            outcomes=trained.outcomes + body.outcomes,
            notes=trained.notes + body.notes,
            seconds=trained.seconds + body.seconds,
        )
    new.recompile()
    if own is not None or any(of_checkpoints.values()):
        trained = replace(trained, checks=(check_of_parts(module, captured.given, own, of_checkpoints),))
    return trained


def _output(captured: Captured, outcome: Outcome) -> fx.Node:
    """The node of the ATen graph that is now the output of a rewritten site."""
    output = output_of(captured.module.graph, outcome.node)
    assert output is not None
    return output


def _move_origins(captured: Captured, outcome: Outcome, sites: dict[str, fx.Node]) -> None:
    """Give the new output of a site the origins of the node that it replaces."""
    place = sites.get(outcome.node)
    if outcome.rewritten and place is not None:
        captured.origins[_output(captured, outcome)] = captured.origins.pop(place)


def _spliced(captured: Captured, outcome: Outcome, recompute: str, checkpointed: bool) -> Outcome:
    """Put the code of a site into the Dynamo graph, and return the outcome; unchanged if that is refused."""
    if not outcome.rewritten:
        return outcome
    output = _output(captured, outcome)
    try:
        if UP_PROJECTIONS in output.meta:
            if checkpointed:
                raise Refusal(
                    output, "expected scores that nothing else reads in a checkpoint, found scores that have to exist"
                )
            recompute_keys_and_values(captured, output)
            return outcome
        code = splice(captured, output)
        recompute_operands(code)
        _tell(code)
    except Refusal as refusal:
        return replace(unchanged(output, refusal), node=outcome.node)
    if recompute != QUERIES:
        return outcome
    try:
        recompute_queries(captured, output, code)
    except Refusal as refusal:
        return replace(outcome, reason=f"{outcome.reason}; queries are kept: {refusal.reason}")
    return replace(outcome, reason=f"{outcome.reason}, and so are queries")


def _tell(code: Iterable[fx.Node]) -> None:
    """Tell ops with several implementations what is asked for: a backward may compute them again."""
    for node in code:
        if node.target is torch.ops.mla.expanded_attention.default:
            node.kwargs = {**node.kwargs, **told()}


def _checkpoints(module: fx.GraphModule) -> list[str]:
    """The names of the graphs whose activations are recomputed."""
    bodies = [node.args[0] for node in module.graph.nodes if is_checkpoint(node)]
    return list(dict.fromkeys(str(body.target) for body in bodies if isinstance(body, fx.Node)))
