"""Where a launch of a Triton kernel goes: to the device, or into the graph that is being traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import triton
from torch.library import wrap_triton

_TRACED: ContextVar[bool] = ContextVar("traced", default=False)


@contextlib.contextmanager
def into_a_graph() -> Iterator[None]:
    """Launches in this context are nodes of the graph that is traced, for Inductor to make."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


def launched(kernel: Any) -> Any:
    """What takes a grid and then the arguments, as a kernel does."""
    return _Traced(kernel) if _TRACED.get() else kernel


@dataclass(frozen=True)
class _Traced:
    """A kernel whose launches are traced."""

    kernel: Any

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        def trace(
            *arguments: Any, num_warps: int, enable_fp_fusion: bool, num_stages: int | None = None, **constants: Any
        ) -> None:
            # Inductor compiles kernels that are not its own with Triton's defaults: products and sums are fused.
            assert enable_fp_fusion
            wrap_triton(_configured(self.kernel, num_warps, num_stages))[grid](*arguments, **constants)

        return trace


@functools.cache
def _configured(kernel: Any, num_warps: int, num_stages: int | None) -> Any:
    """A kernel with options of the compiler's: the same object each time, as torch keeps every one that it is given."""
    stages = {} if num_stages is None else {"num_stages": num_stages}
    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps, **stages)], key=[])(kernel)
