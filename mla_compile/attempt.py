"""An attempt to rewrite a graph that needs no gradients, within AOTAutograd.

    sealed graph -> AOTAutograd without decompositions -> passes -> retrace with Inductor's -> Inductor

The exception that leaves AOTAutograd says that there was nothing to rewrite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table

from mla_compile.cost import Device
from mla_compile.kernels import compiled as cpp_kernels

from .artifacts import own_artifacts
from .dynamo.graph import copied, dtypes_on_cpu
from .graph_log import is_observed, log_graph
from .inductor.codegen import compile_graph, recorded_or_measured
from .inductor.frozen import compile_frozen, parameters
from .inductor.gpu_kernels import kernels_of
from .inductor.growing_caches import use_memory_again
from .inductor.own_passes import has_pre_grad
from .inductor.retrace import decompositions_of_others, retrace
from .options import Options
from .parallel.replicated import with_replicated_heads
from .passes.graph.index_scores import sum_index_scores
from .passes.outcome import Outcome
from .rewriting import failures_told, raise_strict, rewrite_graph
from .saved import registering, saved_with_kernels
from .verify import VerifiedGraph, check_of_graph

_AFTER_THE_SECOND_TRACE = ("use_joint_graph_passes", "freezing")
"""Inductor settings for passes, its own and users', that expect a graph with Inductor's decompositions. Our graph has
these only after the second trace, so the settings are off until then."""


class NothingToRewrite(Exception):
    """Raised to leave AOTAutograd if nothing was rewritten or, where all attention has to be, not everything was."""


@dataclass
class Attempt:
    """One attempt, and what came of it."""

    module: fx.GraphModule
    """Dynamo's graph, which stays as it is."""
    inputs: Sequence[Any]
    options: Options
    rates: Device
    code: Callable[..., Any]
    """Compiles a rewritten graph; arguments as for Inductor's `compile_fx_inner`."""
    lasts: bool
    """Whether the result is used again, and torch's caches may keep it."""
    all_or_nothing: bool = False
    """Whether an attention that stays unchanged means that all do."""
    outcomes: tuple[Outcome, ...] = ()
    kernels: tuple[str, ...] = ()
    """The sentences of the report on kernels."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The report's wall times. Empty if torch's cache had the artifact, for which the passes did not run."""
    settings: dict[str, Any] = field(
        default_factory=lambda: {name: getattr(inductor_config, name) for name in _AFTER_THE_SECOND_TRACE}
    )
    """The settings that are off until after the second trace, as they are in force then."""

    def compile(self, sealed: fx.GraphModule, tag: str, *, use_cache: bool) -> Callable[..., Any]:
        """Compile a copy of the sealed graph. The passes run unless torch's cache has the artifact.

        Raises:
            NothingToRewrite: if the graph is left to stock Inductor.
            PassesError: if the passes fail.
            StrictError: with `mla.strict`, if an attention stays unchanged and another does not.
        """
        done = {"use_pre_grad_passes": False} if has_pre_grad() else {}
        use_cache = use_cache and self.lasts and not self._is_used_once()
        own = decompositions_of_others()
        with (
            own_artifacts(f"{tag} {self.settings}", use_cache),
            inductor_config.patch(dict.fromkeys(self.settings, False) | done),
        ):
            compiled = compile_graph(copied(sealed), self.inputs, inner_compile=self._inner, decompositions=own)
        cpp_kernels.make_ready(self._dtypes())
        return saved_with_kernels(compiled, self._dtypes())

    def _is_used_once(self) -> bool:
        """Whether the result must not be cached: it verifies itself, is observed, or has parameters as constants."""
        return self.options.verify or is_observed() or self.settings["freezing"]

    def _dtypes(self) -> list[torch.dtype]:
        return dtypes_on_cpu(self.module, self.inputs)

    def _inner(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with inductor_config.patch(self.settings):
            return self._rewrite_and_compile(module, inputs, **kwargs)

    def _rewrite_and_compile(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with failures_told():
            rewriting = rewrite_graph(module, self.rates, self.options)
        self.outcomes = with_replicated_heads(rewriting.outcomes, module, self.inputs)
        self.seconds["passes"] = rewriting.seconds
        rewritten = [outcome.rewritten for outcome in self.outcomes]
        if not any(rewritten) or (self.all_or_nothing and not all(rewritten)):
            raise NothingToRewrite
        if self.options.strict:
            raise_strict(self.outcomes, "")
        cpp_kernels.begin(self._dtypes())
        # Rounded otherwise, scores may name another of two keys that are almost equal, which a check would not forgive.
        if rewriting.original is None:
            with failures_told():
                indexes = sum_index_scores(module.graph)
            if indexes:
                cpp_kernels.begin_indexers(self._dtypes())
        retraced = self._timed("retrace", retrace, module)
        if not inductor_config.freezing:  # freezing runs these passes itself
            retraced = self._timed("joint_passes", _recursive_joint_graph_passes, retraced)
        use_memory_again(retraced)
        log_graph("mla_retraced", retraced)
        self.kernels = kernels_of(retraced.graph, self.options.kernels, recorded=recorded_or_measured())
        if "get_decomp_fn" in kwargs:
            kwargs["get_decomp_fn"] = select_decomp_table
        own = parameters()  # read now: freezing removes them from the arguments
        if inductor_config.freezing:
            compiled = compile_frozen(retraced, inputs, self.module, self.code, kwargs)
        else:
            compiled = registering(self.code)(retraced, inputs, **kwargs)
        if rewriting.original is None:
            return compiled
        return VerifiedGraph(compiled, [check_of_graph(rewriting.original, module, self.outcomes, own)])

    def _timed(self, part: str, step: Callable[[fx.GraphModule], fx.GraphModule], module: fx.GraphModule) -> Any:
        start = time.perf_counter()
        after = step(module)
        self.seconds[part] = time.perf_counter() - start
        return after
