"""Remember which arguments a Triton kernel reads and writes, so that equal launches are analysed once.

To see which arguments a kernel writes to, torch makes Triton compile it to its intermediate representation, several
times for each launch in a graph. Layers launch the same kernels with arguments of the same kinds, and the answer is a
list of argument names, so it holds for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir

_ASK = ("identify_accessed_tensors", "identify_mutated_tensors")
"""The names of that analysis in torch since 2.13, and before."""
_OURS = "mla_compile.kernels"


@contextlib.contextmanager
def accesses_remembered() -> Iterator[None]:
    """While a graph is compiled, reuse torch's analysis of one of our launches for all equal launches."""
    with contextlib.ExitStack() as patches:
        for name in _ASK:
            if hasattr(triton_kernel_wrap, name):
                asked = _remembering(getattr(triton_kernel_wrap, name))
                patches.enter_context(mock.patch.object(triton_kernel_wrap, name, asked))
        yield


def _remembering(ask: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    def answer(kernel: Any, kwargs: Mapping[str, Any], descriptors: Any, *more: Any) -> Any:
        if descriptors or more or not _is_ours(kernel):
            return ask(kernel, kwargs, descriptors, *more)
        key = (kernel, *((name, _kind(value)) for name, value in sorted(kwargs.items())))
        if key not in known:
            known[key] = ask(kernel, kwargs, descriptors)
        found = known[key]
        return list(found) if isinstance(found, list) else found

    return answer


def _is_ours(kernel: Any) -> bool:
    while hasattr(kernel, "fn"):  # Triton's objects around the function
        kernel = kernel.fn
    return str(kernel.__module__).startswith(_OURS)


def _kind(value: Any) -> Hashable:
    """What reads and writes depend on in an argument: the value of a number, the dtype of a tensor."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype
    if isinstance(value, ir.IRNode):
        return "tensor", value.get_dtype()
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    return type(value), str(value)
