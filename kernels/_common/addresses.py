"""Where tensors lie in memory, for kernels that read rows 16 bytes at a time or by TMA. Does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNED = 16
"""Addresses and strides have to be multiples of this many bytes."""


def begins_aligned(t: Tensor, to: int = ALIGNED) -> bool:
    """Whether a tensor's first element is at a multiple of `to` bytes, at most 16; in a graph, whether its offset is
    one, as memory begins at one if torch allocates it."""
    if isinstance(t, FakeTensor):
        return bool(t.storage_offset() * t.itemsize % to == 0)
    return t.data_ptr() % to == 0


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its rows cannot be read 16 bytes at a time."""
    steps = [stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
    even = t.stride(-1) == 1 and all(step and step * t.itemsize % ALIGNED == 0 for step in steps)
    return t if even and begins_aligned(t) else t.clone(memory_format=torch.contiguous_format)
