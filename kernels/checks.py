"""Argument checks shared by all implementations, made before any arithmetic.

Every message says in one sentence what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ..errors import KernelError

INTEGERS = (torch.int32, torch.int64)
"""The dtypes of lengths, positions and indices."""


def check_shapes(op: str, dims: Mapping[str, int], **tensors: tuple[Tensor, str]) -> None:
    """Check each tensor against its dims, written as in `mla_compile.ops`: `q_rope=(q_rope, "B Sq N R")`.

    Raises: KernelError naming the op, the tensor, and the expected and found shape.
    """
    for name, (tensor, spec) in tensors.items():
        words = _words(spec)
        shape, expected = tuple(tensor.shape), tuple([dims[word] for word in words])
        if shape != expected:
            raise KernelError(
                f"mla::{op}: expected {name} of shape [{', '.join(words)}] = {list(expected)}, found {list(shape)}"
            )


def check_rank(op: str, name: str, tensor: Tensor, spec: str) -> None:
    """Check a tensor's rank, before its sizes are used to name dims. Raises: KernelError."""
    if tensor.dim() != len(_words(spec)):
        raise KernelError(
            f"mla::{op}: expected {name} of shape [{', '.join(_words(spec))}], found {list(tensor.shape)}"
        )


@cache
def _words(spec: str) -> tuple[str, ...]:
    return tuple(spec.split())


def check_alike(op: str, **tensors: Tensor) -> None:
    """Check that all tensors share the first one's floating dtype and its device. Raises: KernelError."""
    first_name, first = next(iter(tensors.items()))
    dtype, device = first.dtype, first.device
    if not dtype.is_floating_point:
        raise KernelError(f"mla::{op}: expected {first_name} of a floating dtype, found {dtype}")
    for name, tensor in tensors.items():
        if tensor is not first and (tensor.dtype != dtype or tensor.device != device):
            raise KernelError(
                f"mla::{op}: expected {name} of {first_name}'s {dtype} on {device}, "
                f"found {tensor.dtype} on {tensor.device}"
            )


def check_mask(op: str, mask: Tensor | None, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Check that a mask is bool or floating and broadcasts to `[B, N, Sq, T]`. Raises: KernelError."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise KernelError(f"mla::{op}: expected mask of a bool or floating dtype, found {mask.dtype}")
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        raise KernelError(
            f"mla::{op}: expected mask that broadcasts to [B, N, Sq, T] = {list(shape)}, found {list(mask.shape)}"
        )
    if mask.device != device:
        raise KernelError(f"mla::{op}: expected mask on {device}, found {mask.device}")
