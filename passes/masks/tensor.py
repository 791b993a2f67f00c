"""An arbitrary tensor: a mask of the graph of which no more is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..algebra.terms import Read
from ..attention.scores import Mask
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
    words: tuple[str, ...] = field(default=("tensor",), compare=False)

    @property
    def reads(self) -> tuple[Read, ...]:
        return (self.read,)

    def tensor(self, pairs: Pairs) -> Tensor | Filled:
        tensor = pairs(self.read)
        if self.attends:
            return Filled(~tensor if self.inverted else tensor, self.fill)
        tensor = tensor.to(torch.promote_types(pairs.site.node.meta["val"].dtype, torch.float32))
        return tensor * self.factor if self.factor != 1.0 else tensor


def tensor_mask(mask: Mask) -> TensorMask:
    """A mask of a site's scores as an arbitrary tensor."""
    return TensorMask(mask.term.read, mask.attends, mask.factor, mask.held(mask.fill), mask.inverted, (mask.word,))
