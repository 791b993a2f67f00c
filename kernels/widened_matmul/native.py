"""A few rows times a weight in C++ (`native.cpp`), for decode steps: the implementation for CPU tensors.

In compiled graphs `dispatcher/widened_matmul.h` does the same without this Python code. Everything else goes to
`aten.py`: float64, more rows, a weight whose columns are not contiguous, no C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..bundles import checked
from ..dispatcher import general
from ..native import LINE_PRODUCTS, NUMBER, TYPES, VECTOR, Kernels
from .arguments import WidenedMatmul
from .aten import multiply_by_panels

MOST_ROWS = 64 if torch.cpu._is_avx512_supported() else 32
"""Rows up to which the kernel is faster than the library's product with a weight that is widened first."""
KERNELS = Kernels(
    (VECTOR, NUMBER, LINE_PRODUCTS, *(Path(__file__).with_name(name) for name in ("call.h", "native.cpp"))),
    ("const float*", "const void*", "float*") + ("int64_t",) * 7,
)


def multiply_on_cpu(operands: WidenedMatmul) -> Tensor:
    """`[S, M]`."""
    x = operands.x.to(operands.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    kernel = KERNELS.of(operands.weight.dtype) if operands.weight.dtype in TYPES else None
    out = x.new_empty((x.shape[0], operands.weight.shape[-1]))
    for rows, weight in operands.groups():
        if kernel is None or not _suits(x[rows], weight):
            multiply_by_panels(x[rows], weight, out[rows])
        else:
            _run(kernel, x[rows], weight, out[rows])
    return out


def _suits(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] <= MOST_ROWS and weight.stride(0) == 1


def _run(kernel: Callable[..., None], x: Tensor, weight: Tensor, out: Tensor) -> None:
    sizes = x.shape[0], *weight.shape
    kernel(x, weight, out, *sizes, x.stride(0), weight.stride(1), out.stride(0), torch.get_num_threads())


widened_matmul_cpu = checked(WidenedMatmul, multiply_on_cpu)
general("widened_matmul")(widened_matmul_cpu)
