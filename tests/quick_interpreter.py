"""Triton's interpreter without work that has no effect, which is more than half of its time.

It computes each sum of 32-bit integers again in 64 bits, for an assertion that it then skips; and it patches
`triton.language` once for a launch, and again for each call of a function in it.

In Triton 3.6 it also converts an array of one element to a number, which NumPy 2.4 refuses: it is given the element.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from triton.runtime import interpreter


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    options = interpreter.interpreter_builder.options
    assert not options.debug, "the assertions are not left out any more"
    unchecked = dataclasses.replace(options, sanitize_overflow=False)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patch_tensor = interpreter._patch_lang_tensor
    patched: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        """Patch for the functions of a module once per launch."""
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def patch_tensor_for_any_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def launch_with_nothing_patched(self: Any, *arguments: Any, **settings: Any) -> Any:
        patched.clear()
        return launch(self, *arguments, **settings)

    with (
        mock.patch.object(interpreter.interpreter_builder, "options", unchecked),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_tensor_for_any_numpy),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_with_nothing_patched),
    ):
        yield
