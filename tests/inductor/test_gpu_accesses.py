"""torch's analysis of what a Triton kernel reads and writes runs once for equal launches, and again for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton
from torch._higher_order_ops import triton_kernel_wrap

from mla_compile.inductor.gpu_accesses import accesses_remembered
from mla_compile.kernels._common.launching import _configured
from mla_compile.kernels.append_latents.kernel import append
from mla_compile.kernels.merge_states.kernel import merge

_NAMES = "identify_accessed_tensors", "identify_mutated_tensors"
NAME = next(name for name in _NAMES if hasattr(triton_kernel_wrap, name))


def arguments(dtype: torch.dtype = torch.bfloat16, rows: int = 4, **constants: Any) -> dict[str, Any]:
    return {"o": torch.empty(rows, 8, dtype=dtype, device="meta"), "rows": rows, **constants}


@pytest.fixture
def asked() -> Iterator[list[Any]]:
    """The kernels that are analysed while a graph is compiled, in order. The analysis itself is replaced."""
    kernels: list[Any] = []

    def ask(kernel: Any, kwargs: dict[str, Any], descriptors: Any) -> list[str]:
        kernels.append(kernel)
        return [*kwargs]

    with mock.patch.object(triton_kernel_wrap, NAME, ask), accesses_remembered():
        yield kernels


def ask(kernel: Any, **kwargs: Any) -> Any:
    return getattr(triton_kernel_wrap, NAME)(kernel, kwargs, {})


def test_launches_that_are_alike_are_asked_of_once(asked: list[Any]) -> None:
    kernel = _configured(merge, 4, None)
    first, second = (ask(kernel, **arguments(BLOCK=8)) for _ in range(2))
    assert (first, second, asked) == (["o", "rows", "BLOCK"], ["o", "rows", "BLOCK"], [kernel])


def test_others_are_asked_of_again(asked: list[Any]) -> None:
    kernels = _configured(merge, 4, None), _configured(append, 4, None), merge
    given = arguments(), arguments(torch.float32), arguments(rows=5), arguments(BLOCK=8), arguments(BLOCK=None)
    for kernel in kernels:
        for each in given:
            ask(kernel, **each)
    assert asked == [kernel for kernel in kernels for _ in given]


def test_kernels_of_others_are_asked_of_each_time(asked: list[Any]) -> None:
    @triton.jit
    def own(o, rows):
        pass

    for _ in range(2):
        ask(own, **arguments())
    assert asked == [own, own]
