"""What the compiled graphs of a dtype call on CPU, made ready while Inductor compiles them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import dispatcher
from .latent_attention import cached
from .native import TYPES
from .per_head_matmul import native as per_head_matmul


def begin(dtypes: Iterable[torch.dtype]) -> None:
    """Compile in the background what `make_ready` waits for; at once if all is on disk."""
    dispatcher.begin()
    for dtype in _with_kernels(dtypes):
        cached.begin(dtype, dtype, dtype)
        per_head_matmul.begin(dtype)


def make_ready(dtypes: Iterable[torch.dtype]) -> None:
    """Let torch call the kernels for tensors of these dtypes without Python, as far as there is a compiler."""
    for dtype in _with_kernels(dtypes):
        dispatcher.provide("latent_attention", (dtype,) * 3, cached.kernel_for(dtype, dtype, dtype))
        dispatcher.provide("per_head_matmul", (dtype,), per_head_matmul.kernel_for(dtype))


def _with_kernels(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    return [dtype for dtype in dict.fromkeys(dtypes) if dtype in TYPES and dtype != torch.float8_e4m3fn]
