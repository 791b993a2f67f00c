"""One graph on its way to Inductor.

    Dynamo graph -> seal -> AOTAutograd without decompositions -> passes -> retrace with Inductor's -> Inductor

If gradients are needed, the passes run before differentiation:

    Dynamo graph -> functional ATen -> passes -> rewritten parts put into the Dynamo graph -> AOTAutograd -> Inductor

A graph with nothing to rewrite goes to stock Inductor as if this backend did not exist.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.compiler.config
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import (
    _recursive_joint_graph_passes,
    _recursive_pre_grad_passes,
    compile_fx,
    compile_fx_inner,
)
from torch._inductor.decomposition import select_decomp_table

from mla_compile import device as devices
from mla_compile.cost import Device
from mla_compile.kernels import compiled as cpp_kernels
from mla_compile.passes.outcome import Outcome

from . import options as option_parser
from .artifacts import cache_tag
from .asked import AUTO
from .dynamo import differentiated
from .dynamo.control_flow import copy_parts, has_apart
from .dynamo.flex import write_out
from .dynamo.graph import copied, inline_regions
from .dynamo.seal import CACHEABLE, seal_with_parts
from .errors import PassesError
from .graph_log import is_observed, log_graph
from .inductor.frozen import compile_frozen, parameters
from .inductor.gpu_accesses import accesses_remembered
from .inductor.gpu_kernels import kernels_of, kernels_of_training, packages_for
from .inductor.gpu_launches import put_launches
from .inductor.gpu_products import products_of
from .inductor.gpu_together import together
from .inductor.gpu_writes import write_in_parts
from .inductor.growing_caches import use_memory_again
from .inductor.interpreted import interpreted
from .inductor.loop_splits import split_loops_evenly
from .inductor.loops import settings_of_loops
from .inductor.retrace import decompositions_of_others, retrace
from .options import Options
from .parallel.replicated import with_replicated_heads
from .report import Report
from .rewriting import failures_told, raise_strict, rewrite_graph
from .stored import ReportStore
from .training.rewrite import rewrite_for_training
from .verify import Verified, VerifiedGraph, check_of_graph

Inputs = Sequence[Any]
_log = logging.getLogger(__name__)
_compiler_config: Any = torch.compiler.config  # a config module; its stubs lack `patch`
_AFTER_THE_SECOND_TRACE = ("use_joint_graph_passes", "freezing")
"""Inductor settings for passes, its own and users', that expect a graph with Inductor's decompositions. Our graph has
these only after the second trace, so the settings are off until then."""


class _NothingToRewrite(Exception):
    """Raised to leave AOTAutograd if nothing was rewritten or, where all attention has to be, not everything was."""


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
        self.outcomes: tuple[Outcome, ...] = ()
        self.note = ""
        self.kernels: tuple[str, ...] = ()
        self.seconds: dict[str, float] = {}
        self.all_or_nothing = False
        self.failed = False
        """Whether the passes failed on this graph."""
        self.inductor = {name: getattr(inductor_config, name) for name in _AFTER_THE_SECOND_TRACE}

    def run(self) -> Callable[..., Any]:
        split_loops_evenly()
        reason = self._reason_for_stock()
        if reason is not None:
            return self._stock(reason, looked=False)
        if self._needs_gradients():
            return self._train()
        sealed = self._copy()
        tag = cache_tag(self.options, self._rates(), packages_for(self.inputs))
        tag += " recorded" * _recorded_or_measured()  # on which the sentences of a report depend
        if (compiled := self._without_flex(copied(sealed), tag)) is not None:
            return compiled
        seal_with_parts(sealed)
        store = ReportStore(sealed, self.inputs, tag)
        stored = None if is_observed() else store.load()
        if stored is not None and not stored.rewritten:
            self.outcomes = stored.sites
            return self._stock(self._nothing())
        try:
            compiled = self._compile(sealed, tag, use_cache=True)
            if not self.seconds and stored is None:  # torch's cache had the artifact, but its report is missing
                compiled = self._compile(sealed, tag, use_cache=False)
        except _NothingToRewrite:
            if not self.failed:
                store.save(Report(self.outcomes))
            return self._stock(self._nothing())
        if self.seconds:
            store.save(Report(self.outcomes, kernels=self.kernels))
        elif stored is not None:
            self.outcomes, self.kernels = stored.sites, stored.kernels
        return compiled

    def _without_flex(self, written_out: fx.GraphModule, tag: str) -> Callable[..., Any] | None:
        """Compile a graph with every flex_attention written out; None if it has none or not all is rewritten."""
        try:
            with failures_told():
                if not write_out(written_out):
                    return None
        except PassesError as error:
            self._tell(error)
            return None
        seal_with_parts(written_out)
        self.all_or_nothing = True
        try:
            # The text of a graph, by which torch's caches and our reports are keyed, lacks flex_attention's functions.
            return self._compile(written_out, tag, use_cache=False)
        except _NothingToRewrite:
            self.outcomes, self.seconds, self.all_or_nothing = (), {}, False
            return None

    def _copy(self) -> fx.GraphModule:
        """A copy of the graph for the passes, with nested regions inlined and the user's own passes applied.

        The user's passes look for attention as it is written, so they run before it is sealed.
        """
        module = copied(self.module)
        inline_regions(module)
        copy_parts(module)
        return _recursive_pre_grad_passes(module, self.inputs) if self._has_own_passes() else module

    def _has_own_passes(self) -> bool:
        return inductor_config.use_pre_grad_passes and inductor_config.pre_grad_custom_pass is not None

    def _dtypes_on_cpu(self) -> list[torch.dtype]:
        tensors = itertools.chain(self.inputs, self.module.parameters(), self.module.buffers())
        return [t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_cpu]

    def _compile(self, sealed: fx.GraphModule, tag: str, use_cache: bool) -> Callable[..., Any]:
        """Compile a copy of the sealed graph. The passes run unless torch's cache has the artifact."""
        done = {"use_pre_grad_passes": False} if self._has_own_passes() else {}
        own = decompositions_of_others()
        with (
            self._own_artifacts(f"{tag} {self.inductor}", use_cache and not self._is_used_once()),
            inductor_config.patch(dict.fromkeys(self.inductor, False) | done),
        ):
            compiled = _compile_fx(copied(sealed), self.inputs, inner_compile=self._inner, decompositions=own)
        cpp_kernels.make_ready(self._dtypes_on_cpu())
        return compiled

    def _is_used_once(self) -> bool:
        """Whether the result must not be cached: it verifies itself, is observed, or has parameters as constants."""
        return self.options.verify or is_observed() or self.inductor["freezing"]

    @contextlib.contextmanager
    def _own_artifacts(self, tag: str, use_cache: bool) -> Iterator[None]:
        """Let torch's caches serve only artifacts made with this `tag`; with `use_cache` off, none at all."""
        with (
            _compiler_config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}{tag}"),
            functorch_config.patch(
                enable_autograd_cache=functorch_config.enable_autograd_cache and self.lasts and use_cache
            ),
            inductor_config.patch(
                unsafe_marked_cacheable_functions=inductor_config.unsafe_marked_cacheable_functions | CACHEABLE
            ),
        ):
            yield

    def _reason_for_stock(self) -> str | None:
        if self.options.path == option_parser.OFF:
            return "mla.path is off"
        if differentiated.by_itself(self.module):
            return "the graph computes gradients of its own"
        return None

    def _nothing(self) -> str:
        if self.failed:
            return "the passes failed on the graph"
        if self.outcomes:
            return "nothing to rewrite"
        if self._needs_gradients() and has_apart(self.module):
            return "no attention but in control flow or nested regions, which stay where gradients are needed"
        return "no attention in the graph"

    def _rates(self) -> Device:
        return self.options.device or devices.rates_of(self.inputs)

    def _needs_gradients(self) -> bool:
        return differentiated.by_callers(self.module, self.inputs)

    def _train(self) -> Callable[..., Any]:
        rates = self._rates()
        try:
            with failures_told():
                trained = rewrite_for_training(self.module, rates, self.options)
        except PassesError as error:
            self._tell(error)
            return self._stock(self._nothing())
        self.outcomes, self.note = trained.outcomes, "; ".join(trained.notes)
        self.seconds["passes"] = trained.seconds
        if not any(outcome.rewritten for outcome in self.outcomes):
            return self._stock(self.note or self._nothing(), looked=not self.note)
        if self.options.strict:
            raise_strict(self.outcomes, self.note)
        cpp_kernels.begin_training(self._dtypes_on_cpu())
        log_graph("mla_trained", trained.module)
        self.kernels = kernels_of_training(trained.module, self.options.kernels, recorded=_recorded_or_measured())
        with self._own_artifacts(cache_tag(self.options, rates), use_cache=True):
            settings = self.settings | settings_of_loops(trained.module.graph)
            compiled = _compile_fx(trained.module, self.inputs, inner_compile=compile_fx_inner, config_patches=settings)
        return Verified(compiled, trained.checks) if trained.checks else compiled

    def _stock(self, note: str, *, looked: bool = True) -> Callable[..., Any]:
        self.note = f"stock Inductor, {note}"
        if self.options.strict:
            raise_strict(self.outcomes, note, looked=looked)
        return self._unchanged()

    def _inner(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        with inductor_config.patch(self.inductor):
            return self._rewrite_and_compile(module, inputs, **kwargs)

    def _rewrite_and_compile(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        try:
            with failures_told():
                rewriting = rewrite_graph(module, self._rates(), self.options)
        except PassesError as error:
            self._tell(error)
            raise _NothingToRewrite from error
        self.outcomes = with_replicated_heads(rewriting.outcomes, module, self.inputs)
        self.seconds["passes"] = rewriting.seconds
        rewritten = [outcome.rewritten for outcome in self.outcomes]
        if not any(rewritten) or (self.all_or_nothing and not all(rewritten)):
            raise _NothingToRewrite
        if self.options.strict:
            raise_strict(self.outcomes, "")
        cpp_kernels.begin(self._dtypes_on_cpu())
        retraced = self._timed("retrace", retrace, module)
        if not inductor_config.freezing:  # freezing runs these passes itself
            retraced = self._timed("joint_passes", _recursive_joint_graph_passes, retraced)
        use_memory_again(retraced)
        log_graph("mla_retraced", retraced)
        self.kernels = kernels_of(retraced.graph, self.options.kernels, recorded=_recorded_or_measured())
        if "get_decomp_fn" in kwargs:
            kwargs["get_decomp_fn"] = select_decomp_table
        own = parameters()  # read now: freezing removes them from the arguments
        if inductor_config.freezing:
            compiled = compile_frozen(retraced, inputs, self.module, self._code, kwargs)
        else:
            compiled = self._code(retraced, inputs, **kwargs)
        if rewriting.original is None:
            return compiled
        return VerifiedGraph(compiled, [check_of_graph(rewriting.original, module, self.outcomes, own)])

    def _tell(self, error: PassesError) -> None:
        """Warn that the passes failed, which must not cost the user a model that stock Inductor compiles."""
        if self.options.strict:
            raise error
        self.failed = True
        _log.warning("%s", error, exc_info=error.__cause__)
        advice = "The graph is left to stock Inductor. Please report this, with the log of logger mla_compile"
        warnings.warn(f"mla_compile: {error}. {advice}.", stacklevel=2)

    def _timed(self, part: str, step: Callable[[fx.GraphModule], fx.GraphModule], module: fx.GraphModule) -> Any:
        start = time.perf_counter()
        after = step(module)
        self.seconds[part] = time.perf_counter() - start
        return after

    def _code(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        # Under max_autotune, tiles and implementations are timed at an op's first call, so ops have to stay ops.
        decodes = not inductor_config.max_autotune and put_launches(
            module.graph, self.options.kernels, recorded=_records_cuda_graphs()
        )
        if decodes:
            write_in_parts(module.graph)
            module.recompile()
            log_graph("mla_launches", module)
        with (
            inductor_config.patch(settings_of_loops(module.graph)),
            products_of(module.graph),
            accesses_remembered() if decodes else contextlib.nullcontext(),
            # Leave combo kernels alone if the user has set the option.
            together() if decodes and "combo_kernels" not in self.settings else contextlib.nullcontext(),
        ):
            return compile_fx_inner(module, inputs, **kwargs)

    def _unchanged(self) -> Callable[..., Any]:
        # The gradients of an op of ours that the user calls hold what is asked for; all else is as without us.
        tag = "" if self.options.kernels == AUTO else f" mla.kernels={self.options.kernels}"
        with _compiler_config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}{tag}"):
            return _compile_fx(self.module, self.inputs, config_patches=self.settings)


def _records_cuda_graphs() -> bool:
    """Whether Inductor is asked to record what it compiles here and now in CUDA graphs."""
    return bool(inductor_config.triton.cudagraphs)


def _recorded_or_measured() -> bool:
    """Whether an op's kernels are recorded, or measured against each other at its first call, here and now."""
    return _records_cuda_graphs() or bool(inductor_config.max_autotune)


class Examination(Compilation):
    """One graph, compiled in the same way but without Inductor's code generation."""

    lasts = False

    def _code(self, module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Any:
        return interpreted(module, inputs)

    def _unchanged(self) -> Callable[..., Any]:
        return self.module


def _compile_fx(module: fx.GraphModule, inputs: Inputs, **kwargs: Any) -> Callable[..., Any]:
    compiled: Any = compile_fx(module, list(inputs), **kwargs)
    assert callable(compiled)
    return compiled
