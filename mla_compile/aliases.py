"""Tensors that share memory, which loops in graphs do not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_torch_c: Any = torch._C  # `_is_alias_of` is not in its stubs


def apart(leaves: Sequence[Any]) -> list[Any]:
    """Tensors and whatever is among them, with a copy of each tensor that shares memory with an earlier one."""
    kept: list[Any] = []
    for leaf in leaves:
        shared = isinstance(leaf, Tensor) and any(share_memory(leaf, o) for o in kept if isinstance(o, Tensor))
        kept.append(leaf.clone() if shared else leaf)
    return kept


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, even if none of its elements is in both."""
    return bool(_torch_c._is_alias_of(a, b))
