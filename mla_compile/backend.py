"""The `mla` backend of torch.compile.

Dynamo graph -> options -> compilation -> report -> compiled code
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.compiler.config
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.lowering import FALLBACK_ALLOW_LIST

import mla_compile.kernels.register  # noqa: F401  registers the kernels of the ops
from mla_compile.kernels._common.tuning import tuning

from . import ops
from . import options as option_parser
from .asked import AUTO, kept_to, measured
from .compilation import Compilation, Examination, Inputs
from .dynamo import variants
from .dynamo.uncompiled import warn_of_generate
from .dynamo.wrappers import pass_over_shared_wrappers
from .report import Report, record

_log = logging.getLogger(__name__)

if torch.distributed.is_available():
    # The sharding rules need private parts of torch. If these have changed, our ops fail on DTensors, but nothing else.
    try:
        from .parallel import sharding

        sharding.register()
    except (ImportError, AttributeError) as error:
        _log.info("no sharding rules: %s: %s", type(error).__name__, error)

# Inductor calls our ops as they are, even if `implicit_fallbacks` is off: that they have no lowering is intended.
FALLBACK_ALLOW_LIST.update(f"mla::{name}" for name in ops.__all__)


def mla(
    module: fx.GraphModule,
    inputs: Inputs,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: rewrite its MLA attention and leave everything else to Inductor.

    Registered with torch as the backend "mla". `options` and `mode` are those of `torch.compile`. Keys of `options`
    that start with `mla.` are fields of `Options`; all others are Inductor's.

    Raises:
        OptionError: for an unknown option or an invalid value.
        StrictError: with `mla.strict`, if an attention stays unchanged or there is none.
        VerifyError: with `mla.verify`, on the first call, if a rewritten site differs from the original.
    """
    return _compile(module, inputs, Compilation, options, mode)


def examined(
    module: fx.GraphModule, inputs: Inputs, options: Mapping[str, Any] | None, kept: list[Report]
) -> Callable[..., Any]:
    """As `mla`, but for `explain`, which needs no generated code: the rewritten graph runs op by op. Its report is
    added to `kept`."""
    return _compile(module, inputs, Examination, options, kept=kept)


def _compile(
    module: fx.GraphModule,
    inputs: Inputs,
    kind: type[Compilation],
    options: Mapping[str, Any] | None,
    mode: str | None = None,
    kept: list[Report] | None = None,
) -> Callable[..., Any]:
    ours, inductor = option_parser.parse(options, mode)
    with inductor_config.patch(inductor):
        start = time.perf_counter()
        compilation = kind(module, inputs, ours, inductor)
        # For gradients, whose graph is made here.
        with kept_to(ours.kernels), measured(bool(inductor.get("max_autotune"))):
            compiled = compilation.run()
        seconds = compilation.seconds | {"compile": time.perf_counter() - start}
        report = Report(compilation.outcomes, compilation.note, seconds, compilation.kernels)
        record(report)
        if kept is not None:
            kept.append(report)
        if report.rewritten and kind.lasts:
            variants.remember(module)
            pass_over_shared_wrappers()
        if inductor.get("max_autotune"):
            compiled = _within(tuning, compiled)
        if ours.kernels == AUTO:
            return compiled
        return _within(functools.partial(kept_to, ours.kernels), compiled)


warn_of_generate(mla)


def _within(context: Callable[[], AbstractContextManager[None]], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Run `compiled` in a context that decides which kernels its calls use."""

    def call(*arguments: Any) -> Any:
        with context():
            return compiled(*arguments)

    return call
