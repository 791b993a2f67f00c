"""Choose what a site becomes: its path, by sizes and the cost model, and how that reads the keys and takes the masks.

Sizes may be symbolic: the decision is made at their hints, and the inequalities that it rests on become guards of the
compiled graph, so that other sizes either rightly take the same path or compile again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from sympy.core.relational import Relational

from ..masks.meaning import Meaning, understand
from ..mla.site import Site
from ..nodes.shapes import hints_of, unbacked_in
from ..trace.trace import Trace
from . import all as every
from .agreement import NOTHING
from .by_cost import by_cost
from .choice import Candidates, Choice
from .of_ranks import OfRanks
from .of_values_alone import of_values_alone, where_values_pay
from .path import Path
from .plan import Plan
from .plans import plan_of, plan_of_groups
from .setting import Ranges, Setting

__all__ = ["Choice", "Chooser", "Ranges"]


@dataclass(frozen=True)
class Chooser(Setting):
    """Chooses for the sites of one graph."""

    def __call__(self, site: Site, meaning: Meaning, trace: Trace) -> Choice:
        """The choice for a site.

        Raises:
            Refusal: if rewriting would gain nothing.
        """
        if site.unproved_keys is not None:
            return of_values_alone(self, site, meaning)
        paths = every.paths_of(site, meaning, training=self.training)
        asked = next((path for path in paths if path.word == self.wanted), None)
        candidates = self._candidates(site, meaning, trace, paths if asked is None else (asked,))
        settled = asked or (candidates.paths[0] if len(candidates.paths) == 1 else None)
        if settled is None:
            return by_cost(self, site, meaning, candidates)
        settled.refuse(settled.as_taken(site), asked=asked is not None)
        why = settled.as_written(site) or (settled.why if asked is None else "asked for by mla.path")
        return Choice(candidates.plan(settled), why, self.guard(candidates.conditions))

    def where_values_pay(self, site: Site) -> tuple[Relational, ...]:
        """See `of_values_alone.where_values_pay`."""
        return where_values_pay(self, site)

    def _candidates(self, site: Site, meaning: Meaning, trace: Trace, paths: tuple[Path, ...]) -> Candidates:
        """The paths that leave keys on the ranks that have them, if there are any and that pays; else all."""

        def gathered(why: str, *conditions: Relational) -> Candidates:
            def plan(path: Path) -> Plan:
                own, groups = path.as_taken(site), site.groups
                own_meaning = meaning if own is site else understand(own, trace)
                plain = plan_of(path, own, own_meaning) if groups is None else plan_of_groups(path, groups, trace)
                return replace(plain, words="; ".join(filter(None, (plain.words, why and f"gathers keys: {why}"))))

            return Candidates(paths, plan, conditions)

        alone = self.ranges is None and site.groups is None and not (site.apart or site.own_ropes)
        hints: dict[sympy.Symbol, int] = {}
        if self.agreement.same != NOTHING:
            hints = hints_of(site.sizes.values(), self.environment)
        of_ranks = OfRanks.of(site, trace, self.agreement, paths, hints) if alone else None
        if of_ranks is None or isinstance(of_ranks, str):
            return gathered(of_ranks or "")
        able = tuple(path for path in paths if of_ranks.takes(path))
        pays = of_ranks.pays
        if unbacked_in(pays):
            return gathered("sizes that are known only at run time")
        if not pays.subs(hints):
            return gathered("that moves fewer bytes than exchanging outputs", sympy.Not(pays))
        return Candidates(able, of_ranks.plan, (pays,))
