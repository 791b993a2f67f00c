"""Send launches of Triton kernels to the device, or into the graph that is being traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from torch.utils._pytree import tree_flatten, tree_unflatten

_TRACED: ContextVar[bool] = ContextVar("traced", default=False)


def into_a_graph(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a launcher so that it can be traced: its launches become nodes of the graph, and Inductor makes them.

    The nodes are functional: the tensors that a kernel writes to are results. A node without results would be removed
    as dead code.
    """

    def trace(*operands: Any, **more: Any) -> Any:
        leaves, structure = tree_flatten((operands, more))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def of_tensors(*given: Tensor) -> Any:
            supply = iter(given)
            known = [next(supply) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            operands, more = tree_unflatten(known, structure)
            return launch(*operands, **more)

        token = _TRACED.set(True)
        try:
            return torch.func.functionalize(of_tensors)(*tensors)
        finally:
            _TRACED.reset(token)

    return trace


def is_traced() -> bool:
    """Whether launches go into a graph."""
    return _TRACED.get()


def launched(kernel: Any) -> Any:
    """An object that takes a grid and then the arguments, like a kernel."""
    return _Traced(kernel) if is_traced() else kernel


@dataclass(frozen=True)
class _Traced:
    """A kernel whose launches are traced."""

    kernel: Any

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        def trace(
            *arguments: Any, num_warps: int, enable_fp_fusion: bool, num_stages: int | None = None, **constants: Any
        ) -> None:
            # Inductor compiles users' kernels with Triton's default, which fuses products and sums.
            assert enable_fp_fusion
            wrap_triton(_configured(self.kernel, num_warps, num_stages))[grid](*arguments, **constants)

        return trace


@functools.cache
def _configured(kernel: Any, num_warps: int, num_stages: int | None) -> Any:
    """A kernel with compiler options. Cached, because torch keeps every object that it is given."""
    stages = {} if num_stages is None else {"num_stages": num_stages}
    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps, **stages)], key=[])(kernel)
