"""Have the loops that Inductor generates for a CPU prefetch the rows of weights that they sum.

A product of one row (`streamed_products.py`) reads each weight once, and while tokens are generated from memory. A
CPU's own prefetchers stop where a page ends. A loop over rows that asks for the numbers one page ahead of those that it
reads takes two thirds of the time (docs/cpu.md, on one CPU).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sympy
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.virtualized import V

PAGE = 4096
"""Bytes ahead."""
LEAST_BYTES = 1 << 19
"""Of a tensor. Not measured: smaller ones are left as they are because they may stay in a CPU's caches."""


@contextlib.contextmanager
def rows_prefetched() -> Iterator[None]:
    """A context in which Inductor generates such loops."""
    if sys.platform == "win32":  # whose compiler has no `__builtin_prefetch`
        yield
        return
    plain: Any = CppVecKernel.load

    def load(self: Any, name: str, index: sympy.Expr) -> Any:
        loaded = plain(self, name, index)
        if _streams(self, name, index):
            at = f"{self.args.input(name)} + {cexpr_index(self.rename_indexing(index))}"
            ahead = f"__builtin_prefetch(reinterpret_cast<const char*>({at}) + {PAGE}, 0, 2);"
            if ahead not in self.loads.getvalue():
                self.loads.writeline(ahead)
        return loaded

    # Inductor has no setting for this, nor a hook.
    with mock.patch.object(CppVecKernel, "load", load):
        yield


def _streams(kernel: Any, name: str, index: sympy.Expr) -> bool:
    """Whether an innermost loop sums rows of a large input by vectors of neighbouring numbers."""
    if name not in V.graph.graph_inputs and name not in V.graph.constants:
        return False
    last = len(kernel.itervars) - 1
    if not 0 < kernel.reduction_depth <= last or kernel.tiling_idx != last:
        return False
    bytes_of = V.graph.get_numel(name) * V.graph.get_dtype(name).itemsize
    if not isinstance(bytes_of, int | sympy.Integer) or bytes_of < LEAST_BYTES:
        return False
    renamed, inner = kernel.rename_indexing(index), kernel.itervars[last]
    return renamed.free_symbols > {inner} and kernel._try_get_const_stride(renamed, inner) == 1
