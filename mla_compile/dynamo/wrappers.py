"""Keep torch from starting at wrappers that several functions share, where it cannot look through them anyway.

A decorator's wrapper is one code for all functions that it decorates, and torch limits the variants of a code. Where a
graph breaks below a wrapper, torch compiles the wrapper by itself, without anything in it, once for each function and
kind of input. At the limit it runs everything below uncompiled. transformers 5.24 decorates each `forward` so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType

from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import orig_code_map


def pass_over_shared_wrappers() -> None:
    """Let torch start at the functions instead, for each wrapper that is running now around several of them.

    To be called while torch compiles. A wrapper that runs then is one that the graph did not go through.
    """
    wrapped: dict[CodeType, set[CodeType]] = {}
    for wrapper, function in _running():
        wrapped.setdefault(wrapper, set()).add(function)
    for wrapper, functions in wrapped.items():
        if len(functions) > 1:
            skip_code(wrapper)


def _running() -> Iterator[tuple[CodeType, CodeType]]:
    """Each wrapper that torch has compiled and that is running, and the function that it decorates."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = orig_code_map.get(frame.f_code)
        if code is not None:
            for name in code.co_freevars:
                function = frame.f_locals.get(name)
                if isinstance(function, FunctionType):
                    yield code, function.__code__
        frame = frame.f_back
