"""Log graphs and what the passes did to them.

The log reaches depyf, which writes it to its folder, and tlparse, through torch's trace (`TORCH_TRACE=folder`).
`TORCH_LOGS=+mla_compile` prints it, `TORCH_COMPILE_DEBUG=1` writes it beside Inductor's files, and observers registered
by `observed` are called with it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo import utils as dynamo_utils
from torch._inductor import config as inductor_config

from mla_compile.passes.pipeline import Result
from mla_compile.passes.text.proofs import proof_text

from .dynamo.control_flow import copy_parts

_dynamo_utils: Any = dynamo_utils  # the stubs of these two lack what is used here
_logging: Any = torch._logging
_log = logging.getLogger(__name__)


class Observer(Protocol):
    """An observer of graphs and results."""

    def on_graph(self, name: str, module: fx.GraphModule) -> None:
        """Called with each graph and its name; the module may change later."""

    def on_results(self, results: Sequence[Result]) -> None:
        """Called with what became of a graph's attentions, even if none was rewritten."""


_observers: list[Observer] = []


def log_graph(name: str, module: fx.GraphModule) -> None:
    """Log a graph under a name, and show it to the observers."""
    _log.debug("%s", _dynamo_utils.lazy_format_graph_code(name, module))
    _logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: readable(module),
    )
    if inductor_config.trace.enabled:
        folder = Path(dynamo_utils.get_debug_dir()) / "mla_compile"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(list(folder.iterdir())):03}_{name}.py").write_text(readable(module))
    for observer in _observers:
        observer.on_graph(name, module)


def log_results(results: Sequence[Result]) -> None:
    """Log what was proved about the attentions, as text, and show the results to the observers."""
    texts = [text for r in results for text in _texts(r)] if _is_read() else []
    if texts:
        _log.debug("What was proved\n%s", "\n".join(texts))
        _logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "mla_proofs", "encoding": "string"},
            payload_fn=lambda: "\n".join(texts),
        )
    for observer in _observers:
        observer.on_results(results)


def _texts(result: Result) -> Iterator[str]:
    if result.site is not None:
        yield proof_text(result.site, result.meaning, result.choice)
    if result.stopped is not None:
        yield f"{result.node.name} is unchanged: {result.stopped} stopped, {result.outcome.reason}"


def _is_read() -> bool:
    """Whether the text would be written anywhere."""
    return _log.isEnabledFor(logging.DEBUG) or _traces_are_written()


def _traces_are_written() -> bool:
    trace_log = getattr(_logging._internal, "trace_log", None)  # a private part of torch
    return trace_log is None or trace_log.handlers != []


def readable(module: fx.GraphModule) -> str:
    """A graph as Python, with the dtype, shape, strides and source line of each tensor."""
    return str(module.print_readable(print_output=False, include_stride=True, include_device=True))


def snapshot(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that is not affected by later changes to it."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copy_parts(copied)
    return copied


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every graph and result. Meanwhile caches are not used, so that the passes always run."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def is_observed() -> bool:
    """Whether there is an observer."""
    return bool(_observers)
