"""Compile a function for one run, and leave what torch knows of it for later runs as it is.

torch keeps compiled code, and counts variants, for each code object. So the run is that of a function with code of its
own, which calls the one in question. Code that is entered after a graph break has its own entries all the same: these
are removed, unless there were others before.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.symbolic_convert import InstructionTranslator

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_dynamo: Any = torch._C._dynamo.eval_frame  # not in torch's stubs
_settings: Any = config  # a config module; its stubs lack `patch`
_NO_LIMIT = 1 << 20
_numbers = itertools.count()


@contextlib.contextmanager
def compiled_afresh(function: Callable[..., Any], backend: Backend) -> Iterator[Callable[..., Any]]:
    """A function that runs `function`, compiled by `backend` even if it or a part of it was compiled before."""
    entered: dict[CodeType, bool] = {}
    """The code that was compiled, and whether torch had compiled it before."""

    def noting(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        code = InstructionTranslator.current_tx().f_code
        entered.setdefault(code, bool(_dynamo._debug_get_cache_entry_list(code)))
        return backend(graph, inputs)

    try:
        with _settings.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
            yield torch.compile(_alone(function), backend=noting)
    finally:
        for code in (code for code, before in entered.items() if not before):
            _dynamo.reset_code(code)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another, with code of its own, and a name of its own, by which torch remembers sizes."""

    def afresh(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = afresh.__code__.replace(co_name=f"{afresh.__name__}_{next(_numbers)}")
    return FunctionType(code, _globals_of(function), closure=afresh.__closure__)


def _globals_of(function: Any) -> dict[str, Any]:
    """The global names of a function or of a module's forward: torch imports the modules of all others that it traces,
    which not all can be."""
    function = getattr(function, "_orig_mod", function)  # of a compiled module
    function = inspect.unwrap(getattr(function, "forward", function))
    return getattr(function, "__globals__", globals())
