"""The keys that each query attends to, by their indices: what sparse attention is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from mla_compile.cost import Named

from ..algebra.sizes import Size, symbols_in
from ..algebra.terms import Read
from ..code.reading import Reader
from ..mla.site import Site
from .kind import Kind, not_hidden, without_causal
from .meaning import Meaning
from .naming import Naming


@dataclass(frozen=True)
class NamedKeys:
    """Every query attends to the keys that `naming` names and none of `hiding` hides, up to a causal offset."""

    naming: Naming
    hiding: tuple[Kind, ...]
    offset: Size | None
    uniform_when_empty: bool
    site: Site = field(compare=False, repr=False)

    @classmethod
    def of(cls, site: Site, meaning: Meaning) -> NamedKeys | None:
        """A meaning as named keys; None if no kind names keys, another is not `pair_by_pair`, or any depends on the
        head."""
        naming = next((kind for kind in meaning.kinds if kind.names is not None), None)
        if naming is None or naming.names is None:
            return None
        offset, hiding = without_causal([kind for kind in meaning.kinds if kind is not naming])
        found = cls(naming.names, hiding, offset, meaning.uniform_when_empty, site)
        told = all(kind.pair_by_pair for kind in hiding)
        return found if told and not any(read.axes & set(site.heads) for read in found.reads) else None

    @property
    def count(self) -> Size:
        """How many keys a query names."""
        return self.naming.count

    @property
    def named(self) -> Named:
        """What the cost model is told."""
        return Named(self.count, causal=self.offset is not None)

    @property
    def reads(self) -> list[Read]:
        """The reads that the indices are made of."""
        return [*(read for kind in self.hiding for read in kind.reads), *self.naming.reads]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are not sizes of a tensor."""
        return symbols_in(self.offset or 0).union(self.naming.symbols, *(kind.symbols for kind in self.hiding))

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key, as far as can be told."""
        return not self.uniform_when_empty

    def indices(self, read: Reader) -> tuple[Tensor, int | torch.SymInt | None]:
        """The keys that each query attends to, `[B, Sq, topk]`, -1 for none; and a causal offset that also applies."""
        indices = not_hidden(self.naming.indices(self.site, read), self.hiding, self.site, read)
        return indices, None if self.offset is None else read.realize(self.offset)

    def slots(self, read: Reader, table: Tensor, rows: Any) -> Tensor:
        """The rows of a pool that each query attends to, `[B, Sq, topk]`, -1 for none.

        `table` `[B, pages]` gives the pages of each sequence, which have `rows` rows each.
        """
        indices, offset = self.indices(read)
        if offset is not None:
            last = torch.arange(indices.shape[1], device=indices.device)[:, None].add(offset)
            indices = torch.where(indices > last, -1, indices)
        key = indices.clamp_min(0).long()
        page = table.long().gather(1, (key // rows).flatten(1)).view(key.shape)
        return torch.where(indices < 0, -1, page * rows + key % rows)
