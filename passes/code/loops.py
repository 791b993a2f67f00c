"""A loop over groups of heads that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_torch_c: Any = torch._C  # `_is_alias_of` is not in its stubs


def over_groups(
    attend: Callable[[Sequence[Tensor]], Tensor],
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    group: int,
    out: Tensor,
) -> Tensor:
    """`out` `[B, N, Sq, V]`, filled by `attend`, which gets `group` of the heads of each of `tensors` at a time.

    `dims[i]` is the dimension of heads of tensor i, None where it has none; N is a multiple of `group`.
    """
    heads, kept = out.shape[1], _apart(tensors)

    def more(start: Tensor, out: Tensor, *tensors: Tensor) -> Tensor:
        return (start < heads).squeeze(0)

    def turn(start: Tensor, out: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        here = start + torch.arange(group, device=start.device)
        parts = [t if dim is None else t.index_select(dim, here) for t, dim in zip(tensors, dims, strict=True)]
        return start + group, out.index_copy(1, here, attend(parts))

    start = torch.zeros(1, dtype=torch.int64, device=out.device)
    _, out = torch.ops.higher_order.while_loop(more, turn, (start, out), tuple(kept))
    return out


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of those that share memory with an earlier one: a loop takes none such."""
    kept: list[Tensor] = []
    for tensor in tensors:
        shared = any(_torch_c._is_alias_of(tensor, other) for other in kept)
        kept.append(tensor.clone() if shared else tensor)
    return kept
