"""What a site becomes whose keys are shared out over ranks, if each can attend to its own: see `exchange`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational
from torch import fx
from torch.distributed import distributed_c10d

from ..algebra.sizes import product, same
from ..caches.dense import dense_keys
from ..caches.layouts import find_stored_keys
from ..caches.ranks import Share, share_of
from ..masks.bounds import Bounds
from ..masks.dense import Dense
from ..masks.meaning import Meaning
from ..masks.of_rank import OfRank, over_one_axis
from ..mla.site import Site
from ..trace.trace import Trace
from .carriers import Carrier, Lengths, MaskAndOffset
from .exchange import Exchange
from .form import Form
from .one_op import OneOp, OneOpCode
from .path import Part, Path

NOTHING, PROGRAM, MASKS, QUERIES = SAME = "nothing", "program", "masks", "queries"
"""What all ranks of a group have the same of that gathers keys: each says what the one before says, and more."""


@dataclass(frozen=True)
class FormOfRanks(Form):
    """A path for the part of a site that one rank has, and what ranks exchange for it."""

    share: Share
    exchange: Exchange

    def parts(self, site: Site, workspace_tokens: int) -> list[Part]:
        """All in the place of the attention."""
        assert isinstance(self.path, OneOp)
        assert self.mask is not None
        code = OneOpCode(self.path, self.share.site, self.keys, self.mask, workspace_tokens, self.exchange)
        return [Part(site.node, code)]


@dataclass(frozen=True)
class OfRanks:
    """A site whose keys are shared out, as one rank has it."""

    site: Site
    share: Share
    exchange: Exchange
    whole: Site
    """Whose keys are one axis."""
    meaning: Meaning
    """Of its masks."""
    trace: Trace
    stay: bool
    """Whether keys stay, however many bytes the outputs are."""

    @classmethod
    def of(cls, site: Site, trace: Trace, same_on_ranks: str, *, stay: bool) -> OfRanks | str | None:
        """None if keys are not provably shared out; if they are and have to be gathered, why."""
        share = share_of(site, trace)
        if share is None:
            return None
        found = over_one_axis(site, trace)
        if same_on_ranks == NOTHING:
            return "mla.same_on_ranks is nothing"
        if found is None or found[1].uniform_when_empty:
            return "masks are not told by position"
        whole, meaning = found
        reads = [read for kind in meaning.kinds for read in kind.reads]
        if same_on_ranks == PROGRAM and reads:
            return "the others may have other masks (mla.same_on_ranks)"
        if same_on_ranks != QUERIES and any(not read.axes.isdisjoint(site.heads) for read in reads):
            return "heads have masks of their own"
        exchange = Exchange(share.ranks.group, share.ranks.count, same_on_ranks == QUERIES)
        return cls(site, share, exchange, whole, meaning, trace, stay)

    def takes(self, path: Path) -> bool:
        """Whether it may be a path of one rank's part."""
        return isinstance(path, OneOp) and path.exchanges(same_queries=self.exchange.same_queries)

    @property
    def pays(self) -> Relational:
        """Where a rank receives no more bytes than it would of latents, or keys stay.

        Ranks have to decide alike: of sizes, which they have in common, and of nothing that one measured.
        """
        if self.stay:
            return sympy.true
        source = self.share.site.latent.read.source
        assert isinstance(source, fx.Node)
        gathered = self.site.sizes | {"T": product(axis.size for axis in self.share.keys)}
        keys = self.exchange.received_keys(gathered, source.meta["val"].element_size())
        outputs = self.exchange.received(self.site.sizes, self.site.node.meta["val"].element_size())
        return sympy.Ge(sympy.expand(keys), sympy.expand(outputs))

    def form(self, path: Path) -> FormOfRanks:
        """A path for one rank's part."""
        own, site = find_stored_keys(self.share.site), self.share.site
        if own is None or not path.can_read(own, site, self.meaning):
            own = dense_keys(site)
        words = f"{self.exchange.ranks} ranks attend to their own keys and exchange outputs"
        mask = self._mask(in_pages=own.in_pages)
        return FormOfRanks(path, own, mask, "; ".join(w for w in (words, own.words) if w), self.share, self.exchange)

    def _mask(self, *, in_pages: bool) -> Carrier:
        told = (Bounds.of(self.whole, self.meaning) if in_pages else None) or Dense.of(self.whole, self.meaning)
        cut = not same(product(axis.size for axis in self.share.keys), self.site.sizes["T"])
        if not self.meaning.kinds and not in_pages and not cut:
            return MaskAndOffset(Dense.of(self.share.site, self.meaning))
        c10d: Any = distributed_c10d  # its stubs know no names of groups
        rank: int = c10d._resolve_process_group(self.exchange.group).rank()
        own = OfRank(told, self.share.keys, self.share.ranks.axis, rank, self.whole)
        return Lengths(own) if in_pages else MaskAndOffset(own)
