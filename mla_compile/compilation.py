"""The ways of one graph to Inductor.

Without gradients, an attempt to rewrite it:

    Dynamo graph -> seal -> AOTAutograd without decompositions -> passes -> retrace with Inductor's -> Inductor

If gradients are needed, the passes run before differentiation:

    Dynamo graph -> functional ATen -> passes -> rewritten parts put into the Dynamo graph -> AOTAutograd -> Inductor

A graph with nothing to rewrite goes to stock Inductor as if this backend did not exist.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from mla_compile import device as devices
from mla_compile.cost import Device
from mla_compile.kernels import compiled as cpp_kernels

from . import options as option_parser
from .artifacts import cache_tag, own_artifacts, tagged
from .asked import AUTO
from .attempt import Attempt, NothingToRewrite
from .dynamo import differentiated
from .dynamo.control_flow import copy_parts, has_apart
from .dynamo.flex import write_out
from .dynamo.graph import copied, dtypes_on_cpu
from .dynamo.regions import inline_calls
from .dynamo.seal import seal_with_parts
from .errors import PassesError
from .graph_log import is_observed, log_graph
from .inductor.codegen import compile_graph, generated, plain, recorded_or_measured
from .inductor.gpu_kernels import kernels_of_training, packages_for
from .inductor.interpreted import interpreted
from .inductor.loop_splits import split_loops_evenly
from .inductor.loops import settings_of_loops
from .inductor.own_passes import after_pre_grad
from .options import Options
from .passes.outcome import Outcome
from .report import Report
from .rewriting import failures_told, raise_strict
from .saved import registering, saved_with_kernels
from .stored import ReportStore
from .training.rewrite import rewrite_for_training
from .verify import Verified

Inputs = Sequence[Any]
_log = logging.getLogger(__name__)


class Compiled(NamedTuple):
    """A compiled graph."""

    call: Callable[..., Any]
    report: Report
    """Without the time of the whole compilation."""


class Compilation:
    """One graph on its way to Inductor."""

    lasts = True
    """Whether the result is used again, and torch's caches may keep it."""

    def __init__(
        self, module: fx.GraphModule, inputs: Inputs, options: Options, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.module, self.inputs, self.options = module, inputs, options
        self.settings = dict(settings or {})
        """Inductor's settings in force now. They must also hold when a backward is compiled, possibly much later."""
        self.failed = False
        """Whether the passes failed on this graph."""

    def run(self) -> Compiled:
        split_loops_evenly()
        if self.options.path == option_parser.OFF:
            return self._stock("mla.path is off", looked=False)
        if differentiated.by_itself(self.module):
            return self._stock("the graph computes gradients of its own", looked=False)
        if differentiated.by_callers(self.module, self.inputs):
            return self._train()
        sealed = self._copy()
        tag = cache_tag(self.options, self.rates, packages_for(self.inputs))
        tag += " recorded" * recorded_or_measured()  # on which the sentences of a report depend
        return self._without_flex(copied(sealed), tag) or self._rewrite(sealed, tag)

    def _without_flex(self, written_out: fx.GraphModule, tag: str) -> Compiled | None:
        """Compile a graph with every flex_attention written out; None if it has none or not all is rewritten."""
        try:
            with failures_told():
                if not write_out(written_out):
                    return None
            seal_with_parts(written_out)
            attempt = self._attempt(all_or_nothing=True)
            # The text of a graph, by which torch's caches and our reports are keyed, lacks flex_attention's functions.
            compiled = attempt.compile(written_out, tag, use_cache=False)
        except PassesError as error:
            self._tell(error)
            return None
        except NothingToRewrite:
            return None
        return Compiled(compiled, _report(attempt))

    def _rewrite(self, sealed: fx.GraphModule, tag: str) -> Compiled:
        """Compile a graph as what torch's caches have of it, or else as what the passes make of it."""
        seal_with_parts(sealed)
        store = ReportStore(sealed, self.inputs, tag)
        stored = None if is_observed() else store.load()
        if stored is not None and not stored.rewritten:
            return self._stock(self._nothing(stored.sites), stored.sites)
        attempt = self._attempt()
        try:
            compiled = attempt.compile(sealed, tag, use_cache=True)
            if not attempt.seconds and stored is None:  # torch's cache had the artifact, but its report is missing
                compiled = attempt.compile(sealed, tag, use_cache=False)
        except PassesError as error:
            self._tell(error)
            return self._stock(self._nothing(()))
        except NothingToRewrite:
            if not self.failed:
                store.save(Report(attempt.outcomes))
            return self._stock(self._nothing(attempt.outcomes), attempt.outcomes, attempt.seconds)
        if attempt.seconds:
            store.save(Report(attempt.outcomes, kernels=attempt.kernels))
        elif stored is not None:
            return Compiled(compiled, stored)
        return Compiled(compiled, _report(attempt))

    def _train(self) -> Compiled:
        try:
            with failures_told():
                trained = rewrite_for_training(self.module, self.rates, self.options)
        except PassesError as error:
            self._tell(error)
            return self._stock(self._nothing(()))
        outcomes, note, seconds = trained.outcomes, "; ".join(trained.notes), {"passes": trained.seconds}
        if not any(outcome.rewritten for outcome in outcomes):
            return self._stock(note or self._nothing(outcomes), outcomes, seconds, looked=not note)
        if self.options.strict:
            raise_strict(outcomes, note)
        cpp_kernels.begin_training(dtypes_on_cpu(self.module, self.inputs))
        log_graph("mla_trained", trained.module)
        kernels = kernels_of_training(trained.module, self.options.kernels, recorded=recorded_or_measured())
        settings = self.settings | settings_of_loops(trained.module)
        with own_artifacts(cache_tag(self.options, self.rates), self.lasts):
            compiled = compile_graph(
                trained.module, self.inputs, inner_compile=registering(plain), config_patches=settings
            )
        compiled = saved_with_kernels(compiled)
        call = Verified(compiled, trained.checks) if trained.checks else compiled
        return Compiled(call, Report(outcomes, note, seconds, kernels))

    def _stock(
        self,
        note: str,
        outcomes: tuple[Outcome, ...] = (),
        seconds: Mapping[str, float] | None = None,
        *,
        looked: bool = True,
    ) -> Compiled:
        """The graph as stock Inductor compiles it. `looked` says whether the passes have run on all of it."""
        if self.options.strict:
            raise_strict(outcomes, note, looked=looked)
        return Compiled(self._unchanged(), Report(outcomes, f"stock Inductor, {note}", dict(seconds or {})))

    def _copy(self) -> fx.GraphModule:
        """A copy of the graph for the passes, with regions and checkpoints inlined and the user's own passes applied.

        The user's passes look for attention as it is written, so they run before it is sealed.
        """
        module = copied(self.module)
        inline_calls(module)
        copy_parts(module)
        return after_pre_grad(module, self.inputs)

    def _attempt(self, *, all_or_nothing: bool = False) -> Attempt:
        code = self._code
        return Attempt(self.module, self.inputs, self.options, self.rates, code, self.lasts, all_or_nothing)

    def _nothing(self, outcomes: tuple[Outcome, ...]) -> str:
        """Why none of these is rewritten."""
        if self.failed:
            return "the passes failed on the graph"
        if outcomes:
            return "nothing to rewrite"
        if differentiated.by_callers(self.module, self.inputs) and has_apart(self.module):
            return "no attention but in control flow or nested regions, which stay where gradients are needed"
        return "no attention in the graph"

    def _tell(self, error: PassesError) -> None:
        """Warn that the passes failed, which must not cost the user a model that stock Inductor compiles."""
        if self.options.strict:
            raise error
        self.failed = True
        _log.warning("%s", error, exc_info=error.__cause__)
        advice = "The graph is left to stock Inductor. Please report this, with the log of logger mla_compile"
        warnings.warn(f"mla_compile: {error}. {advice}.", stacklevel=2)

    @functools.cached_property
    def rates(self) -> Device:
        return self.options.device or devices.rates_of(self.inputs)

    def _code(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        return generated(module, inputs, self.options.kernels, self.settings, **kwargs)

    def _unchanged(self) -> Callable[..., Any]:
        # The gradients of an op of ours that the user calls hold what is asked for; all else is as without us.
        with tagged("" if self.options.kernels == AUTO else f" mla.kernels={self.options.kernels}"):
            return compile_graph(self.module, self.inputs, config_patches=self.settings)


class Examination(Compilation):
    """One graph, compiled in the same way but without Inductor's code generation."""

    lasts = False

    def _code(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        return interpreted(module, inputs)

    def _unchanged(self) -> Callable[..., Any]:
        return self.module


def _report(attempt: Attempt) -> Report:
    return Report(attempt.outcomes, seconds=attempt.seconds, kernels=attempt.kernels)
