"""Run the passes over one graph for `torch.compile` or an exported program: logged, timed, with a copy for `verify`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .cost import Device
from .dynamo.control_flow import lay_out, layouts_of, parts
from .dynamo.graph import copied
from .errors import MlaCompileError, PassesError, StrictError
from .graph_log import log_graph, log_results, snapshot
from .options import Options
from .passes.outcome import Outcome
from .passes.paths.choose import Ranges
from .passes.pipeline import Pipeline, Result, unknown_strides

BEFORE, AFTER = "mla_before_passes", "mla_after_passes"


@dataclass(frozen=True)
class Rewriting:
    """What the passes did to a graph."""

    outcomes: tuple[Outcome, ...]
    """The outcome of every attention, in order."""
    original: fx.GraphModule | None
    """With `mla.verify`, a copy from before the rewrite, already rephrased (`Pipeline.rephrase`)."""
    seconds: float
    """Wall time of the passes."""


def rewrite_graph(
    module: fx.GraphModule, device: Device, options: Options, ranges: Ranges | None = None, *, training: bool = False
) -> Rewriting:
    """Rewrite the attentions of a functional ATen graph in place; arguments as for `Pipeline`."""
    log_graph(BEFORE, module)
    pipeline = Pipeline(
        device,
        options.path,
        options.workspace_tokens,
        ranges,
        training=training,
        agreement=options.agreement,
    )
    start = time.perf_counter()
    within = {} if training or ranges is not None else parts(module)
    for graph in (module, *within.values()):
        pipeline.rephrase(graph)
    original = snapshot(module) if options.verify else None
    results = pipeline(module)
    results += [result for name, part in within.items() for result in _rewrite_part(pipeline, name, part)]
    seconds = time.perf_counter() - start
    log_results(results)
    outcomes = tuple(result.outcome for result in results)
    if any(outcome.rewritten for outcome in outcomes):
        log_graph(AFTER, module)
    return Rewriting(outcomes, original, seconds)


def _rewrite_part(pipeline: Pipeline, name: str, part: fx.GraphModule) -> list[Result]:
    """Rewrite the attentions of one part of a graph; its results keep their layouts."""
    layouts = layouts_of(part)
    if any(layout is not None and not layout.told for layout in layouts):
        return [unknown_strides(result) for result in pipeline(copied(part))]
    results = pipeline(part)
    for result in results:
        result.outcome = replace(result.outcome, node=f"{name}.{result.outcome.node}")
    if any(result.outcome.rewritten for result in results):
        lay_out(part, layouts)
    return results


@contextlib.contextmanager
def failures_told() -> Iterator[None]:
    """Within this context, an exception of the passes that is not raised on purpose becomes a PassesError."""
    try:
        yield
    except MlaCompileError:
        raise
    except Exception as error:
        raise PassesError(f"the passes failed: {type(error).__name__}: {error}") from error


def raise_strict(outcomes: Sequence[Outcome], note: str, *, looked: bool = True) -> None:
    """Raise StrictError if an attention stays unchanged, or none was found or `looked` for."""
    unchanged = [o for o in outcomes if not o.rewritten]
    if unchanged:
        listed = "\n".join(f"  {o.location}: {o.reason}" for o in unchanged)
        raise StrictError(f"mla.strict: {len(unchanged)} of {len(outcomes)} attentions stay unchanged:\n{listed}")
    if not outcomes:
        found = "a model with MLA attention, found none" if looked else "a graph to rewrite, found one to leave"
        raise StrictError(f"mla.strict: expected {found} ({note})")
