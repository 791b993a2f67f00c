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
from .compilation import Compilation, Compiled, Inputs
from .dynamo import variants
from .dynamo.uncompiled import warn_of_generate
from .dynamo.wrappers import pass_over_shared_wrappers
from .report import record

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
    return compile_and_record(module, inputs, options, mode).call


def compile_and_record(
    module: fx.GraphModule,
    inputs: Inputs,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    kind: type[Compilation] = Compilation,
) -> Compiled:
    """As `mla`, together with the report, which is recorded too. Other threads may compile and record meanwhile.

    `explain` has the kind `Examination`, whose rewritten graph runs op by op, without generated code.
    """
    ours, inductor = option_parser.parse(options, mode)
    with inductor_config.patch(inductor):
        start = time.perf_counter()
        # For gradients, whose graph is made here.
        with kept_to(ours.kernels), measured(bool(inductor.get("max_autotune"))):
            call, report = kind(module, inputs, ours, inductor).run()
        report.seconds["compile"] = time.perf_counter() - start
    record(report)
    if report.rewritten and kind.lasts:
        variants.remember(module)
        pass_over_shared_wrappers()
    if inductor.get("max_autotune"):
        call = _within(tuning, call)
    if ours.kernels != AUTO:
        call = _within(functools.partial(kept_to, ours.kernels), call)
    return Compiled(call, report)


warn_of_generate(mla)


def _within(context: Callable[[], AbstractContextManager[None]], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Run `compiled` in a context that decides which kernels its calls use."""

    def call(*arguments: Any) -> Any:
        with context():
            return compiled(*arguments)

    return call
