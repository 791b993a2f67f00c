"""A mask over all keys and a causal offset: what attention over any keys is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size, known_at_most, symbols_in
from ..algebra.terms import Read
from ..code.reading import Reader
from ..mla.site import Site
from .bounds import Bounds
from .kind import Filled, Kind, without_causal
from .meaning import Meaning
from .pairs import AllPairs
from .positions import Affine


@dataclass(frozen=True)
class Dense:
    """The meaning of a site's masks as a mask of several `parts`, and an offset. Each part hides keys, or adds to
    scores.

    Hidden scores become `fill`, unless the part that hides them has a number of its own.
    """

    parts: tuple[Kind, ...]
    offset: Size | None
    fill: float
    site: Site = field(compare=False, repr=False)

    @classmethod
    def of(cls, site: Site, meaning: Meaning) -> Dense:
        """Takes any meaning, since every kind has a tensor.

        A kind whose tensor would have to be computed is replaced by the masks that it comes from, which the graph has
        once for all layers. These also stand for all other kinds that come from them.
        """
        uniform = meaning.uniform_when_empty
        offset, kinds = (None, meaning.kinds) if uniform else without_causal(meaning.kinds)
        # Kinds that come from masks come from the same ones, of which one may be there twice.
        masks = max((kind.origin for kind in kinds if uniform or not kind.at_hand), key=len, default=())
        own = [kind for kind in kinds if kind not in masks and not (kind.origin and {*masks} >= {*kind.origin})]
        return cls((*masks, *own), offset, meaning.fill, site)

    @property
    def reads(self) -> list[Read]:
        """The reads that the mask is made of."""
        return [read for part in self.parts for read in part.reads]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are not sizes of a tensor."""
        return symbols_in(self.offset or 0).union(*(part.symbols for part in self.parts))

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        return bool(self.parts) or (self.offset is not None and not known_at_most(0, self.offset))

    def mask(self, read: Reader) -> tuple[Tensor | None, int | torch.SymInt | None]:
        """A mask `[B|1, N|1, Sq|1, T|1]` and a causal offset.

        The mask is bool if all parts only reject keys; else it is a number to add.
        """
        offset = None if self.offset is None else read.realize(self.offset)
        masks = self._told(read)
        if all(tensor.dtype == torch.bool and math.isinf(fill) for tensor, fill in masks):
            return (reduce(torch.logical_and, (tensor for tensor, _ in masks)) if masks else None), offset
        # In the user's order: a number that replaces a score also replaces the biases that were added before.
        dtype = torch.promote_types(self.site.node.meta["val"].dtype, torch.float32)
        added = masks[0][0].new_zeros((1, 1, 1, 1), dtype=dtype)
        for tensor, fill in masks:
            added = torch.where(tensor, added, fill) if tensor.dtype == torch.bool else added + tensor.to(dtype)
        if dtype == torch.float64:  # a row that is hidden by numbers has a finite log-sum-exp, which is float32
            lowest = torch.finfo(torch.float32).min
            added = torch.where(added.isneginf(), added, added.clamp_min(lowest))
        return added, offset

    def sees(self, read: Reader) -> Tensor | None:
        """`[B|1, N|1, Sq|1]`: whether a query sees any key. None, unless a finite number may replace all scores of a
        query."""
        masks = self._told(read)
        if all(math.isinf(fill) for _, fill in masks):
            return None
        return reduce(torch.logical_and, (tensor for tensor, _ in masks)).any(-1)

    def _told(self, read: Reader) -> list[tuple[Tensor, float]]:
        """The tensor of each part, and the number that the scores it hides become, if it is bool."""
        pairs = AllPairs(self.site, read)
        told = [part.tensor(pairs) for part in self.parts]
        return [(what.attends, what.fill) if isinstance(what, Filled) else (what, self.fill) for what in told]

    def in_pages(self, read: Reader, like: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """What attention over pages takes: the mask, then what `Bounds.in_pages` gives."""
        mask, _ = self.mask(read)
        bounds = Bounds((), () if self.offset is None else (Affine(self.offset),), self.site)
        return mask, *bounds.in_pages(read, like)[1:]
