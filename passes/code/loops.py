"""Loops over groups of heads that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from mla_compile.aliases import apart

from ..algebra.sizes import Unaligned
from .reading import realizer

Attend = Callable[[Sequence[Tensor]], Tensor]
"""The attention of a group of heads, `[B, H, Sq, V]`, from the group's part of each tensor."""
HeadDims = Sequence[int | None]
"""The dimension of heads of each tensor; None if it has none."""


def over_groups(attend: Attend, tensors: Sequence[Tensor], dims: HeadDims, group: int, out: Tensor) -> Tensor:
    """`out` `[B, N, Sq, V]`, filled by `attend` for `group` of the heads at a time; N is a multiple of `group`."""

    def turn(here: Tensor, parts: Sequence[Tensor], out: Tensor) -> tuple[Tensor, ...]:
        return (out.index_copy(1, here, attend(parts)),)

    (filled,) = loop(turn, [out], tensors, dims, group, out.shape[1])
    return filled


def loop(
    turn: Callable[..., tuple[Tensor, ...]],
    carried: Sequence[Tensor],
    tensors: Sequence[Tensor],
    dims: HeadDims,
    group: int,
    heads: int,
) -> Sequence[Tensor]:
    """What `carried` becomes when `turn(here, parts, *carried)` is applied to one group of heads after the other.

    `here` are the heads of the group, int64 `[group]`, and `parts` are their parts of `tensors`.
    """
    count = len(carried)

    def more(start: Tensor, *others: Tensor) -> Tensor:
        return (start < heads).squeeze(0)

    def body(start: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        here = start + torch.arange(group, device=start.device)
        whole = others[count : count + len(dims)]
        parts = [t if dim is None else t.index_select(dim, here) for t, dim in zip(whole, dims, strict=True)]
        return start + group, *turn(here, parts, *others[:count])

    start = torch.zeros(1, dtype=torch.int64, device=carried[0].device)
    results = torch.ops.higher_order.while_loop(
        more, body, (start, *carried), (*apart(tensors), *_counts([*carried, *tensors]))
    )
    return tuple(results[1:])


def _counts(tensors: Sequence[Tensor]) -> list[torch.SymInt]:
    """The symbols within sizes that are no size themselves: the graphs of a loop have to be given all of these."""
    realize = realizer(tensors)
    counts = [realize(symbol) for symbol in _within(tensors)]
    return [count for count in counts if isinstance(count, torch.SymInt)]


def untold_by(tensors: Sequence[Tensor]) -> list[sympy.Symbol]:
    """The symbols within sizes that the sizes do not determine: a loop over these tensors needs another tensor that
    does."""
    realize = realizer(tensors)
    untold: list[sympy.Symbol] = []
    for symbol in _within(tensors):
        try:
            realize(symbol)
        except Unaligned:
            untold.append(symbol)
    return untold


def _within(tensors: Sequence[Tensor]) -> list[sympy.Symbol]:
    """The symbols within sizes that are no size themselves."""
    all_sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    sizes = [size.node.expr for size in all_sizes if isinstance(size, torch.SymInt)]
    return sorted(set[sympy.Symbol]().union(*(size.free_symbols for size in sizes)).difference(sizes), key=str)
