"""What a site becomes whose keys are shared out over ranks, if each can attend to its own: see `exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational
from torch import fx
from torch.distributed import distributed_c10d

from ..algebra.sizes import product, quotient, same
from ..caches.dense import dense_keys
from ..caches.layouts import find_stored_keys
from ..caches.ranks import Share, share_of
from ..masks.bounds import Bounds
from ..masks.dense import Dense
from ..masks.meaning import Meaning
from ..masks.of_rank import OfRank, over_one_axis
from ..mla.site import Site
from ..trace.trace import Trace
from .agreement import MASKS, NOTHING, PROGRAM, QUERIES, Agreement, Hints
from .all_heads import with_all_heads
from .carriers import Carrier, Lengths, MaskAndOffset
from .exchange import Exchange, Gathered, InLatentSpace, OutsideOfWeights, ScatteredAndGathered, ToOwnHeads
from .one_op import OneOp, OneOpCode
from .path import Part, Path
from .plan import Plan


@dataclass(frozen=True)
class PlanOfRanks(Plan):
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
    """A site whose keys are shared out over ranks, as one rank has it."""

    site: Site
    share: Share
    exchange: Exchange
    whole: Site
    """The site with keys that are one axis."""
    meaning: Meaning
    """The meaning of its masks."""
    trace: Trace
    stay: bool
    """Whether keys stay, however many bytes the outputs are."""

    @classmethod
    def of(
        cls, site: Site, trace: Trace, agreement: Agreement, paths: Sequence[Path], hints: Hints
    ) -> OfRanks | str | None:
        """None if keys are not provably shared out; if they are but have to be gathered, the reason."""
        share = share_of(site, trace)
        if share is None:
            return None
        found = over_one_axis(site, trace)
        if agreement.same == NOTHING:
            return "mla.same_on_ranks is nothing"
        if found is None:
            return "a mask tells the ranks' keys apart otherwise than by positions"
        if found[1].uniform_when_empty:
            return "a query that sees no key attends to all keys of all ranks alike"
        whole, meaning = found
        reads = [read for kind in meaning.kinds for read in kind.reads]
        if agreement.same == PROGRAM and reads:
            return "other ranks may have other masks (mla.same_on_ranks)"
        exchanges = _exchanges(share, agreement.same)
        if any(not read.axes.isdisjoint(site.heads) for read in reads):
            exchanges = [each for each in exchanges if isinstance(each, Gathered | ScatteredAndGathered)]
            if not exchanges:
                return "each head has a mask of its own"
        able = [each for each in exchanges if any(_takes(path, each) for path in paths)]
        if not able:
            return "no path can attend to a part of the keys"
        return cls(site, share, agreement.fastest(able, site, hints), whole, meaning, trace, agreement.stay)

    def takes(self, path: Path) -> bool:
        """Whether a path may be that of one rank's part."""
        return _takes(path, self.exchange)

    @property
    def pays(self) -> Relational:
        """The condition that a rank receives no more bytes than if it gathered keys; true if keys are to stay.

        Ranks have to decide alike: by sizes, which they have in common, and by nothing that one of them measured.
        """
        if self.stay:
            return sympy.true
        source = self.share.site.latent.read.source
        assert isinstance(source, fx.Node)
        gathered = self.site.sizes | {"T": product(axis.size for axis in self.share.keys)}
        keys = self.exchange.received_keys(gathered, source.meta["val"].element_size())
        outputs = self.exchange.received(self.site.sizes, self.site.node.meta["val"].element_size())
        return sympy.Ge(sympy.expand(keys), sympy.expand(outputs))

    def plan(self, path: Path) -> PlanOfRanks:
        """A path for one rank's part."""
        own, site = find_stored_keys(self.share.site), self.share.site
        if own is None or not path.can_read(own, site, self.meaning):
            own = dense_keys(site)
        words = f"{self.exchange.ranks} ranks attend to their own keys and exchange outputs"
        words = ", ".join(filter(None, (words, self.exchange.words)))
        mask = self._mask(in_pages=own.in_pages)
        return PlanOfRanks(path, own, mask, "; ".join(filter(None, (words, own.words))), self.share, self.exchange)

    def _mask(self, *, in_pages: bool) -> Carrier:
        told = (Bounds.of(self.whole, self.meaning) if in_pages else None) or Dense.of(self.whole, self.meaning)
        cut = not same(product(axis.size for axis in self.share.keys), self.site.sizes["T"])
        if not self.meaning.kinds and not in_pages and not cut:
            return MaskAndOffset(Dense.of(self.share.site, self.meaning))
        own = OfRank(told, self.share.keys, self.share.ranks.axis, _rank(self.exchange.group), self.whole)
        return Lengths(own) if in_pages else MaskAndOffset(own)


def _takes(path: Path, exchange: Exchange) -> bool:
    return isinstance(path, OneOp) and path.exchanges(of_latents=exchange.of_latents)


def _exchanges(share: Share, same_on_ranks: str) -> list[Exchange]:
    """The exchanges that are right for a site; the first is the one to take where nothing is known about the link."""
    group, count = share.ranks.group, share.ranks.count
    rank, site = _rank(group), share.site
    if same_on_ranks == QUERIES:
        of_all = with_all_heads(site, count, rank, queries=True)
        if of_all is not None:
            return [ToOwnHeads(group, count, of_all)]
        divided = quotient(site.sizes["N"], count) is not None
        return [Gathered(group, count), *([ScatteredAndGathered(group, count)] if divided else [])]
    of_all = with_all_heads(site, count, rank, queries=False) if same_on_ranks == MASKS else None
    outside = [] if of_all is None else [OutsideOfWeights(group, count, of_all)]
    return [InLatentSpace(group, count), *outside]


def _rank(group: str) -> int:
    c10d: Any = distributed_c10d  # its type stubs do not know names of groups
    rank: int = c10d._resolve_process_group(group).rank()
    return rank
