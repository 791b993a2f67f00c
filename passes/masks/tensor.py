"""An arbitrary tensor: a mask of the graph of which no more is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..algebra.terms import Read
from ..attention.scores import ALL_ALIKE, highest_fill
from ..attention.summands import Mask
from .kind import Filled, Kind
from .pairs import Pairs


@dataclass(frozen=True)
class TensorMask(Kind):
    """A mask as it is: the fields are those of a `Mask`."""

    read: Read
    attends: bool
    factor: float
    fill: float
    inverted: bool
    lowest: float
    highest: float | None
    words: tuple[str, ...] = field(default=("tensor",), compare=False)

    @property
    def reads(self) -> tuple[Read, ...]:
        return (self.read,)

    def tensor(self, pairs: Pairs) -> Tensor | Filled:
        tensor = pairs(self.read)
        if self.attends:
            return Filled(~tensor if self.inverted else tensor, self.fill)
        least = torch.finfo(tensor.dtype).min * self.factor if tensor.is_floating_point() else 0.0
        node = pairs.site.node
        tensor = tensor.to(torch.promote_types(node.meta["val"].dtype, torch.float32))
        added = tensor * self.factor if self.factor != 1.0 else tensor
        if least < self.lowest:
            added = added.masked_fill(added < self.lowest, -math.inf)
        if self.highest is not None and highest_fill(node) < least <= self.highest:  # as with float16
            added = torch.where(added.isneginf() | (added > self.highest), added, ALL_ALIKE)
        return added


def tensor_mask(mask: Mask) -> TensorMask:
    """A mask of a site's scores as an arbitrary tensor."""
    told = mask.attends, mask.factor, mask.held(mask.fill), mask.inverted, mask.lowest, mask.highest
    return TensorMask(mask.term.read, *told, (mask.word,))
