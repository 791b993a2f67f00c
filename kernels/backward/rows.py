"""The queries of one sequence and a group of heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..visibility import KeyPositions, Visibility


@dataclass(frozen=True)
class Rows:
    """The queries of one sequence and a group of heads, and the keys that they see: q `[H, Sq, P + R]`, do and o
    `[H, Sq, V]`, lse and d_lse `[H, Sq]`."""

    q: Tensor
    do: Tensor
    o: Tensor
    lse: Tensor
    d_lse: Tensor | None
    visibility: Visibility
    keys: KeyPositions
    scale: float
