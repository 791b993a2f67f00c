"""Triton's interpreter without work that has no effect, which is more than half of its time.

It computes each sum of 32-bit integers again in 64 bits, for an assertion that it then skips; and it patches
`triton.language` once for a launch, and again for each call of a function in it, asking each time of all names in it
which are to be patched. For each tensor it makes objects of its sizes, and for each value a table of NumPy's dtypes.

In Triton 3.6 it also converts an array of one element to a number, which NumPy 2.4 refuses: it is given the element.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

from triton.language import core
from triton.runtime import interpreter

_of_pointers = interpreter._get_np_dtype
_of_numbers = cache(_of_pointers)
_SIZES: dict[tuple[int, ...], dict[str, Any]] = {}
"""The attributes of a tensor that follow from its shape."""
_init_tensor, _init_block_type = core.tensor.__init__, core.block_type.__init__


def _np_dtype(type: Any) -> Any:
    scalar = type.scalar
    return _of_pointers(scalar) if scalar.is_ptr() else _of_numbers(scalar)  # pointers have no hash


def _init_with_known_sizes(self: Any, handle: Any, type: Any) -> None:
    shape = (*type.shape,) if type.is_block() else ()
    sizes = _SIZES.get(shape)
    if sizes is not None:
        vars(self).update(sizes, handle=handle, type=type, dtype=type.scalar)
        return
    _init_tensor(self, handle, type)
    assert vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}
    _SIZES[shape] = {"shape": self.shape, "numel": self.numel}


@cache
def _block_type(element: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    made = object.__new__(core.block_type)
    _init_block_type(made, element, [*shape])
    return vars(made)


def _init_known_block_type(self: Any, element: Any, shape: Any) -> None:
    if element.is_ptr() or not all(type(size) is int for size in shape):
        _init_block_type(self, element, shape)
    else:
        vars(self).update(_block_type(element, (*shape,)))


@cache
def _builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # not patched yet
            interpreter._patch_attr(package, name, member, builder, scope)


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
        mock.patch.object(interpreter, "_get_np_dtype", _np_dtype),
        mock.patch.object(core.tensor, "__init__", _init_with_known_sizes),
        mock.patch.object(core.block_type, "__init__", _init_known_block_type),
        mock.patch.object(interpreter, "_patch_builtin", _patch_builtins),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_tensor_for_any_numpy),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_with_nothing_patched),
    ):
        yield
